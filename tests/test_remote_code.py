"""No code of others is run: not a repository's, not a kernel's, not a pickle's; and nobody is asked on stdin."""

from __future__ import annotations

import ast
import functools
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hub import Hub
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.hub_client import list_parquet
from volunteer_kit.model import transformers_model
from volunteer_kit.model.repository import ModelRefused, Place, check_settings, look_through
from volunteer_kit.model.transformers_model import TransformersConfig, build_transformers
from volunteer_kit.run_reader import RunError
from volunteer_kit.runs import load_run

ROOT = Path(__file__).parents[1]
TINY = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CODE = """\
import os, pathlib
pathlib.Path(os.environ["MARKER"]).write_text("code of others was run")
from transformers import LlamaConfig, LlamaForCausalLM
class EvilConfig(LlamaConfig):
    model_type = "evil"
class EvilModel(LlamaForCausalLM):
    config_class = EvilConfig
"""
AUTO_MAP = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel", "AutoModel": "evil.EvilModel"}
TRAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "code of its own": ("config.json", {"auto_map": AUTO_MAP, "model_type": "evil"}),
    "code beside a known model": ("config.json", {"auto_map": AUTO_MAP}),
    "code of a part": ("config.json", {"text_config": {"model_type": "llama", "auto_map": AUTO_MAP}}),
    "code in a list": ("config.json", {"parts": [{"auto_map": AUTO_MAP}]}),
    "another repository's code": ("config.json", {"auto_map": {"AutoConfig": "other/repo--evil.EvilConfig"}}),
    "code of the tokenizer": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}),
    "code of the processor": ("processor_config.json", {"auto_map": {"AutoProcessor": "evil.P"}}),
    "code of the image processor": ("preprocessor_config.json", {"auto_map": {"AutoImageProcessor": "evil.P"}}),
    "generate": ("generation_config.json", {"custom_generate": "other/repo"}),
    "a pipeline": ("config.json", {"custom_pipelines": {"x": {"impl": "evil.P"}}}),
    "an adapter of another base": ("adapter_config.json", {"base_model_name_or_path": "/home/me/model"}),
    "a kernel": ("config.json", {"attn_implementation": "evil/kernel"}),
    "a kernel by the old name": ("config.json", {"_attn_implementation": "evil/kernel:fn"}),
    "a kernel by the inner name": ("config.json", {"_attn_implementation_internal": "evil/kernel@main"}),
    "a kernel of a part": ("config.json", {"attn_implementation": {"": "sdpa", "text_config": "evil/kernel"}}),
    "a paged kernel": ("config.json", {"attn_implementation": "paged|evil/kernel"}),
    "flash attention": ("config.json", {"attn_implementation": "flash_attention_2"}),
    "experts": ("config.json", {"experts_implementation": "sonicmoe"}),
    "kernels": ("config.json", {"kernel_config": {"RMSNorm": "evil/kernel:Norm"}}),
    "use kernels": ("config.json", {"use_kernels": True}),
    "quantization by kernels": ("config.json", {"quantization_config": {"quant_method": "mxfp4"}}),
    "quantization of a part": ("config.json", {"text_config": {"quantization_config": {"quant_method": "aqlm"}}}),
    "anything of torch": ("config.json", {"torch_dtype": "load"}),
    "anything of torch, in a part": ("config.json", {"dtype": {"": "hub"}}),
    "other weights": ("config.json", {"transformers_weights": "../../secret.safetensors"}),
    "a backbone": ("config.json", {"use_timm_backbone": True, "backbone": "hf-hub:evil/x"}),
    "fusions": ("config.json", {"fusion_config": {"x": True}}),
    "endless layers": ("config.json", {"num_hidden_layers": 10**7}),
    "endless width": ("config.json", {"hidden_size": 10**12}),
}


@pytest.fixture
def marker(tmp_path, monkeypatch) -> Path:
    """Written by code of others; a question on stdin is answered with yes."""
    path = tmp_path / "marker"
    monkeypatch.setenv("MARKER", str(path))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return path


@pytest.fixture
def no_questions(monkeypatch) -> None:
    def asked(*words: object) -> str:
        raise AssertionError(f"somebody was asked: {words}")

    monkeypatch.setattr("builtins.input", asked)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A small good model."""
    folder = tmp_path_factory.mktemp("good")
    build_transformers(TransformersConfig(config=TINY), 0).save_pretrained(folder)
    return folder


def trapped(good: Path, folder: Path, name: str, values: dict[str, Any]) -> Path:
    shutil.copytree(good, folder)
    before = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
    (folder / name).write_text(json.dumps({**before, **values}))
    (folder / "evil.py").write_text(CODE)
    return folder


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("weights", [True, False])
def test_a_folder_that_would_load_code_is_refused(good, tmp_path, marker, no_questions, trap, weights):
    folder = trapped(good, tmp_path / "base", *TRAPS[trap])
    config = TransformersConfig(transformers=str(folder), lora={"r": 2})
    with pytest.raises(ModelRefused, match=r"was refused: .*\n1\. .*\n2\. ") as caught:
        build_transformers(config, 0, weights=weights)
    assert TRAPS[trap][0] in str(caught.value) and not marker.exists()


@pytest.mark.parametrize("trap", [name for name, (file, _) in TRAPS.items() if file == "config.json"])
def test_a_run_file_that_would_load_code_is_refused(tmp_path, marker, no_questions, trap):
    config = TransformersConfig(config={**TINY, **TRAPS[trap][1]})
    with pytest.raises(ModelRefused, match=r"\n1\. "):
        build_transformers(config, 0)
    assert not marker.exists()


def test_transformers_itself_is_told_to_run_no_code_and_asks_nobody(good, tmp_path, marker):
    """As if the kit's own look had missed it: a process of its own, with a "y" waiting on stdin."""
    folder = trapped(good, tmp_path / "base", *TRAPS["code of its own"])
    code = (
        "import sys\n"
        "from volunteer_kit.model import transformers_model as m\n"
        "m.look_through = lambda name, weights=True: m.Place(name)\n"
        "m.check_settings = lambda *args: None\n"
        f"made = m.TransformersConfig(transformers={str(folder)!r})\n"
        "for build in (lambda: m.build_transformers(made, 0), lambda: m.shapes_of(made)):\n"
        "    try: build(); print('built')\n"
        "    except ValueError as error: print('refused', 'trust_remote_code' in str(error))\n"
        "print(repr(sys.stdin.read()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="y\ny\n", capture_output=True, text=True, timeout=240, cwd=ROOT
    )
    assert done.stdout.splitlines() == ["refused True", "refused True", "'y\\ny\\n'"], done.stderr[-2000:]
    assert not marker.exists()


class Evil:
    def __reduce__(self):
        return (eval, ("__import__('pathlib').Path(__import__('os').environ['MARKER']).write_text('x')",))


def test_pickled_weights_are_not_read(good, tmp_path, marker, no_questions):
    folder = shutil.copytree(good, tmp_path / "base")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(OSError, match="safetensors"):
        build_transformers(TransformersConfig(transformers=str(folder)), 0)
    assert not marker.exists()


def test_good_models_pass(good, no_questions):
    assert look_through(str(good)) == Place(str(good))
    build_transformers(TransformersConfig(transformers=str(good)), 0)
    check_settings(
        {
            "auto_map": None, "attn_implementation": "sdpa", "torch_dtype": "bfloat16", "vocab_size": 256_000,
            "max_position_embeddings": 10_485_760, "rope_theta": 5e8, "_name_or_path": "/home/host/model",
            "quantization_config": {"quant_method": "bitsandbytes", "bnb_4bit_compute_dtype": "bfloat16"},
            "id2label": {str(n): f"LABEL_{n}" for n in range(2000)}, "eos_token_id": 2**31, "num_hidden_layers": 126,
        },
        "a model",
    )  # fmt: skip


def test_a_hub_name_never_means_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    with pytest.raises(ModelRefused, match=r"1\. If the folder is meant, write ./org/name"):
        look_through("org/name")
    assert look_through("./org/name").pretrained_model_name_or_path == "org/name"
    with pytest.raises(ModelRefused, match="neither a folder nor"):
        look_through("./nowhere")


def test_deep_settings_are_refused():
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"x": deep}
    with pytest.raises(ModelRefused, match="nested"):
        check_settings(deep, "x")


def looked_through(name: str) -> tuple[str, str | None] | str:
    """In a process whose Hub is the stand-in."""
    try:
        return tuple(look_through(name))
    except ModelRefused as error:
        return str(error)


def built(name: str) -> str:
    try:
        return type(build_transformers(TransformersConfig(transformers=name), 0)).__name__
    except (ModelRefused, OSError) as error:
        return f"{type(error).__name__}: {error}"


def run_of(name: str) -> str:
    try:
        return load_run(f"hub:{name}").run_id
    except RunError as error:
        return str(error)


def listed(name: str) -> str:
    try:
        return str(list_parquet(name, None, "train", time.monotonic() + 240).shards)
    except DataError as error:
        return str(error)


def test_repositories_of_the_hub_are_looked_through_at_the_commit_that_is_loaded(good, tmp_path, marker):
    with Hub() as hub:
        commit = hub.add("models", "org/good", good)
        evil = {path.name: path.read_bytes() for path in good.iterdir()}
        evil["tokenizer_config.json"] = json.dumps({"auto_map": AUTO_MAP}).encode()
        hub.add("models", "org/evil", evil, revisions=("main", "v1"))
        hub.add("models", "org/pickled", {"config.json": evil["config.json"], "pytorch_model.bin": b"x"})
        hub.add("models", "org/own", {**evil, "config.json": json.dumps({"auto_map": AUTO_MAP}).encode()})
        large = b"{" + b" " * 9 * 2**20 + b"}"
        hub.add("models", "org/large", {**evil, "tokenizer_config.json": large})
        hub.add("models", "org/run", {"run.yaml": b"#" * 300_000})
        with hub.client(tmp_path / "hf") as ask:
            assert ask(looked_through, "org/good") == ("org/good", commit)
            assert ask(built, "org/good") == "LlamaForCausalLM"
            for name in ("org/evil", "org/evil@v1", "org/own"):
                assert "auto_map" in ask(looked_through, name)
                assert ask(built, name).startswith("ModelRefused")
            assert "no weights in the safetensors format" in ask(built, "org/pickled")
            assert "a configuration at most" in ask(looked_through, "org/large")
            assert "has 300000 bytes" in ask(run_of, "org/run")
            fetched = [asked.path for asked in hub.asked if asked.method == "GET"]
        assert not any(path.endswith(("evil.py", "pytorch_model.bin", "org/large/resolve/main")) for path in fetched)
        assert not any("/org/good/resolve/main/" in path for path in fetched), "only the commit that was checked"
    assert not marker.exists()


OUTSIDE: list[Any] = [
    "/etc/*.parquet", "/**", "~/x.parquet", "../../*.parquet", "{inner}/x.parquet", "zip://x::{inner}/x.zip",
    "hf://datasets/other/private/x.parquet", "file:///etc/*.parquet", "s3://a/b.parquet", ["data/*", "/etc/*"],
    {"train": "/etc/*.parquet"}, [{"split": "train", "path": "{inner}/*.parquet"}],
]  # fmt: skip


def test_a_data_sets_card_names_files_of_its_repository_only(tmp_path):
    """`datasets` would look at them: a folder of this machine, a server of its network."""
    with Hub() as hub, Hub() as inner:
        for number, files in enumerate(OUTSIDE):
            named = json.loads(json.dumps(files).replace("{inner}", inner.url))
            about = json.dumps({"configs": [{"config_name": "default", "data_files": named}]})
            card, text = ("README.md", f"---\n{about}\n---\n") if number % 2 else (".huggingface.yaml", about)
            hub.add("datasets", f"org/d{number}", {card: text.encode(), "data/train.parquet": b"PAR1"})
        with hub.client(tmp_path / "hf") as ask:
            for number, files in enumerate(OUTSIDE):
                assert "outside its repository" in ask(listed, f"org/d{number}"), files
        assert inner.asked == []


# --- the package itself ---


@functools.cache
def calls(path: Path) -> list[ast.Call]:
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        lines = "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code").splitlines()
        source = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in lines)
    else:
        source = path.read_text()
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def says(call: ast.Call, name: str, value: object) -> bool:
    return any(
        keyword.arg == name and isinstance(keyword.value, ast.Constant) and keyword.value.value is value
        for keyword in call.keywords
    )


FILES = sorted(
    path for folder in ("volunteer_kit", "benchmarks", "notebooks") for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".ipynb") and ".ipynb_checkpoints" not in path.parts
)  # fmt: skip
NEVER = {"eval", "exec", "pickle.load", "pickle.loads", "joblib.load", "yaml.load", "yaml.unsafe_load", "marshal.loads",
         "dill.load", "dill.loads", "torch.hub.load", "pipeline"}  # fmt: skip
OF_PEFT = {"PeftModel", "AutoPeftModelForCausalLM"}


def test_every_call_that_loads_a_model_says_that_no_code_is_run():
    wrong = []
    for path in FILES:
        for call in calls(path):
            name = dotted(call.func)
            owner, _, method = name.rpartition(".")
            of_transformers = owner.startswith(("Auto", "transformers.")) or owner.endswith("ForCausalLM")
            if method == "from_pretrained" or (method == "from_config" and of_transformers):
                if owner not in OF_PEFT and not says(call, "trust_remote_code", False):
                    wrong.append(f"{path.relative_to(ROOT)}:{call.lineno}: {name} without trust_remote_code=False")
            if name == "torch.load" and not says(call, "weights_only", True):
                wrong.append(f"{path.relative_to(ROOT)}:{call.lineno}: torch.load without weights_only=True")
            if name in NEVER or any(keyword.arg == "allow_pickle" and not says(call, "allow_pickle", False)
                                    for keyword in call.keywords):  # fmt: skip
                wrong.append(f"{path.relative_to(ROOT)}:{call.lineno}: {name}")
    assert not wrong, "\n".join(wrong)
    found = {dotted(call.func) for path in FILES for call in calls(path)}
    assert {"AutoConfig.from_pretrained", "AutoModelForCausalLM.from_config", "torch.load"} <= found


def test_only_safetensors_are_read_by_the_package():
    source = (ROOT / "volunteer_kit/model/transformers_model.py").read_text()
    for call in (call for call in calls(ROOT / "volunteer_kit/model/transformers_model.py")):
        if dotted(call.func) == "AutoModelForCausalLM.from_pretrained":
            assert says(call, "use_safetensors", True) and says(call, "weights_only", True)
    assert "trust_remote_code=True" not in source and transformers_model.look_through is look_through
    assert os.environ.get("TRUST_REMOTE_CODE") is None
