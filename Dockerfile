# The kit in an image, for a host on a server: see docs/server.md and compose.yaml. x86-64, because hivemind's wheel is.
# Secrets never go into it: compose.yaml hands them to the container.

FROM python:3.12-slim-bookworm AS wheel
WORKDIR /source
RUN python -m pip install --no-cache-dir "build>=1.2,<2"
COPY . .
RUN python -m build --wheel --outdir /wheel

FROM python:3.12-slim-bookworm
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1
# The CPU build: a host trains nothing. First, so that a new version of the kit leaves this layer as it is.
RUN python -m pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
COPY --from=wheel /wheel /wheel
RUN python -m pip install --no-cache-dir "$(echo /wheel/*.whl)[server]" \
    && volunteer-kit setup \
    && rm -r /wheel
# Volumes take over the owner of the folders that they are mounted on.
RUN useradd --uid 10001 --create-home kit && install -d -o kit -g kit -m 700 /data /data/host /data/host/keys
ENV VOLUNTEER_KIT_HOME=/data/home
USER 10001:10001
WORKDIR /data
EXPOSE 31337
ENTRYPOINT ["volunteer-kit"]
CMD ["--help"]
