"""The notebook of one run: its link and its host's kit are filled in, and nothing in it is about another place."""

from __future__ import annotations

import ast
import json
import re

import nbformat
import pytest

from volunteer_kit.host import HostError, join_notebook
from volunteer_kit.host.join_notebook import install_cell
from volunteer_kit.host.join_notebook import join_notebook as make

URLS = ["https://run.example.org/kit/volunteer_kit-0.1.0-py3-none-any.whl", "https://huggingface.co/a/b/resolve/main/k"]
LINK, SHA256 = "https://run.example.org", "ab" * 32


def notebook(**changes) -> nbformat.NotebookNode:
    words = {"run_id": "cats", "link": LINK, "wheel_urls": URLS, "sha256": SHA256, "version": "0.1.0"} | changes
    return nbformat.reads(make(**words).decode(), as_version=4)


def code(made: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in made.cells if cell.cell_type == "code"]


def assigned(source: str) -> dict[str, object]:
    """Names that a cell gives constants at its top level."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def test_it_is_a_notebook_that_asks_for_a_gpu_and_shows_no_code():
    made = notebook()
    nbformat.validate(made)
    assert made.metadata.accelerator == "GPU" and made.metadata.kaggle.isInternetEnabled
    assert len(code(made)) == 2
    for cell in code(made):
        assert cell.metadata.cellView == "form" and cell.metadata.jupyter.source_hidden
        assert cell.source.startswith("# @title") and not cell.outputs
    text = "\n".join(cell.source for cell in made.cells if cell.cell_type == "markdown")
    assert "choose a GPU" in text and LINK in text and "Before you lend a machine" in text


def test_a_run_of_one_network_promises_no_platform():
    first = notebook(link="http://127.0.0.1:8000").cells[0].source
    assert "choose a GPU" in first and "T4 GPU" not in first and "cannot reach this run" in first


def test_what_the_host_gives_is_filled_in():
    install, join = code(notebook())
    values = assigned(install.source)
    assert values["WHEEL_URLS"] == URLS and values["SHA256"] == SHA256 and values["VERSION"] == "0.1.0"
    assert assigned(join.source)["RUN"] == LINK


def test_nothing_of_the_demo_or_a_checkout_is_left():
    text = make("cats", LINK, URLS, SHA256, "0.1.0").decode()
    for words in ("OWNER", '"demo"', "`demo`", "mybinder", "gallery.ipynb", "colab-badge", "ORGANIZATION/RUN"):
        assert words not in text, words


def test_every_package_that_it_installs_is_pinned():
    for line in re.findall(r"pip[ '\",]+install(.*)", code(notebook())[0].source):
        assert not re.search(r"[ '\"]volunteer-kit[ '\"]", line), line


def test_equal_words_give_equal_bytes():
    assert make("cats", LINK, URLS, SHA256, "0.1.0") == make("cats", LINK, URLS, SHA256, "0.1.0")


def test_a_runs_words_are_no_markup_and_end_no_string():
    made = notebook(run_id="<b>x</b>", description="![a](http://evil) *b* <script>\n# title", link='https://a.org/"+x+"')
    first = made.cells[0].source
    assert "<script>" not in first and "![a]" not in first and "<b>" not in first and "\n# title" not in first
    assert assigned(code(made)[1].source)["RUN"] == 'https://a.org/"+x+"'


def test_an_install_cell_without_its_lines_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(join_notebook, "INSTALL_CELL", tmp_path / "cell.py")
    (tmp_path / "cell.py").write_text("WHEEL_URLS = []\nSHA256 = ''\n")
    with pytest.raises(HostError, match="VERSION"):
        install_cell(URLS, SHA256, "0.1.0")
    (tmp_path / "cell.py").write_text("WHEEL_URLS: list[str] = []  # host first\nSHA256 = ''\nVERSION = ''\n")
    assert assigned("\n".join(install_cell(URLS, SHA256, "1").splitlines()[1:])) == {
        "WHEEL_URLS": URLS, "SHA256": SHA256, "VERSION": "1",
    }  # fmt: skip


def test_the_file_is_plain_json():
    assert json.loads(make("cats", LINK, URLS, SHA256, "0.1.0"))["nbformat"] == 4
