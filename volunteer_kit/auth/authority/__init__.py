"""A run's authority: a small server that lets people in by their login at the Hugging Face Hub, and shuts them out.

    settings = Settings(run_id="demo", url="https://auth.example.org", allowlist=Allowlist.of("an-org", moderators=...))
    app = create_app(settings, Storage("authority.sqlite", "demo"), KeyFolder("keys"))
    serve(app, host="::", port=8443, tls_cert="cert.pem", tls_key="key.pem")

desk.py lets in, moderators.py shuts out, hub_login.py asks the Hub; storage.py keeps; api.py and page.py are the ways
to them. Needs the packages of `volunteer-kit[server]`, so importing this package imports none of them.
"""
