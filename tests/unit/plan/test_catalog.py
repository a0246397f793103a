"""Catalog tables, what names resolve to, and one clear line where they resolve to nothing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memconsole.memory.state.sizes import sizes
from memconsole.plan import catalog
from memconsole.plan.catalog import folders, sources
from memconsole.plan.check import check, device_kind
from memconsole.plan.machine import stdlib
from memconsole.plan.plan import DataChoice, ModelChoice, Plan, PlanError, replace
from memconsole.plan.toggles.optimizations import OPTIMIZATIONS, conflict

PUBLISHED_PARAMETERS = {
    "gearhead": 34_083_904,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "gemma-2b": 2_506_172_416,
    "gemma-3-1b": 999_885_952,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "granite-3.1-2b": 2_533_531_648,
    "olmo-2-1b": 1_484_916_736,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
}


def changed(**settings: Any) -> Plan:
    """The default plan with ``section__name=value`` changed."""
    return replace(Plan(), {key.replace("__", "."): value for key, value in settings.items()})


def error_of(plan: Plan) -> PlanError:
    with pytest.raises(PlanError) as caught:
        check(plan)
    assert "\n" not in str(caught.value)
    return caught.value


# models


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_a_catalog_model_has_its_published_number_of_parameters(name: str) -> None:
    architecture = catalog.architecture(changed(model__name=name))
    assert sizes(architecture).total == PUBLISHED_PARAMETERS[name]
    assert catalog.models()[name].parameters == PUBLISHED_PARAMETERS[name]


def test_every_fixed_model_says_its_true_size_and_its_source() -> None:
    for entry in catalog.models().values():
        assert entry.source
        assert (entry.parameters is None) == (entry.kind == "sized")
        if entry.kind == "fixed":
            model = catalog.model(Plan(model=ModelChoice(name=entry.name)))
            assert sum(p.size for p in model.parameters()) == entry.parameters
        if entry.architecture is not None:
            assert sizes(entry.architecture).total == entry.parameters
            assert entry.architecture.heads % entry.architecture.kv_heads == 0


def test_the_default_plan_is_a_million_parameters() -> None:
    check(Plan())
    assert sizes(catalog.architecture(Plan())).total == pytest.approx(1_000_000, rel=0.02)


def test_the_vocabulary_of_a_sized_model_is_the_plans_then_the_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(
        json.dumps({"model": {"vocab": {"a": 0, "b": 1998}}, "added_tokens": [{"id": 1999}]})
    )
    given = changed(data__tokenizer=str(path))
    assert catalog.architecture(given).vocab_size == 2000
    check(given)
    assert catalog.architecture(changed(data__vocab_size=512)).vocab_size == 512
    both = changed(data__tokenizer=str(path), data__vocab_size=4000)
    assert catalog.architecture(both).vocab_size == 4000
    check(both)
    small = error_of(changed(data__tokenizer=str(path), data__vocab_size=1000))
    assert small.key == "data.tokenizer"
    path.write_text(json.dumps({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}}))
    os.utime(path, ns=(1, 1))
    assert catalog.architecture(given).vocab_size == 2


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"vocab": {}}}', "[" * 10_000])
def test_what_is_no_tokenizer_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    assert "not a tokenizer;" in str(error_of(changed(data__tokenizer=str(path))))
    assert "no such file" in str(error_of(changed(data__tokenizer=str(tmp_path / "none"))))


@pytest.mark.parametrize("content", ['{"bos_token": "<s>",}', "[]", '{"chat_template": 3}'])
def test_a_fault_in_a_file_beside_a_tokenizer_is_told_of_that_file(
    tmp_path: Path, content: str
) -> None:
    tokenizer, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    tokenizer.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    config.write_text(content)
    for path in (tokenizer, tmp_path):
        told = str(error_of(changed(data__tokenizer=str(path))))
        assert told.startswith(f"{config}: cannot be read: ")


def test_a_tokenizer_that_cannot_be_read_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    os.mkfifo(path)
    given = changed(data__tokenizer=str(path))
    assert f'"{path}": cannot be read: a named pipe, not a file' in str(error_of(given))
    path.unlink()
    path.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))

    def forbidden(*_: object) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("memconsole.regular_file.read", forbidden)
    assert str(error_of(given)).endswith('tokenizer.json": cannot be read: Permission denied')


def test_long_rows_extend_a_sized_models_positions() -> None:
    assert catalog.architecture(changed(data__sequence_length=8192)).max_positions == 8192


def test_an_unknown_model_names_the_nearest() -> None:
    assert 'did you mean "gpt2-large"' in str(error_of(changed(model__name="gpt2-lagre")))
    assert "stories" in str(error_of(changed(model__name="zzz")))


# devices


def test_every_device_is_plausible_and_has_a_source() -> None:
    for device in catalog.devices().values():
        assert device.source, device.name
        assert 0.6 * device.total_bytes < device.usable_bytes <= device.total_bytes
        assert set(device.peak_flops) == {"fp32", "tf32", "bf16", "fp16"}
        assert min(device.peak_flops.values()) > 1e12
        assert device.peak_flops["fp32"] <= device.peak_flops["bf16"]
        assert device.peak_flops["fp32"] <= device.peak_flops["fp16"]
        assert 5e10 < device.bandwidth_bytes_per_second < 1e13
        expected = "unified memory" if device.kind == "apple" else None
        assert device.memory_label == expected or device.kind != "apple"
        assert device_kind(device.name) == device.kind


def test_the_devices_people_name_are_there() -> None:
    named = (
        "rtx-3060-12gb rtx-4090 rtx-5080-16gb a100-40gb a100-80gb h100-80gb h200 b200 l4 t4 rx-6750-xt-12gb "
        "mi300x m2-16gb m4-16gb tpu-v2 tpu-v3 tpu-v4 tpu-v5e tpu-v5p tpu-v6e tpu-7x"
    )
    assert set(named.split()) <= set(catalog.devices())


def test_usable_tpu_memory_is_what_its_compiler_allows() -> None:
    gib = {"v2": 7.48, "v3": 15.48, "v4": 30.75, "v5e": 15.75, "v5p": 95.73, "v6e": 31.24}
    for generation, usable in gib.items():
        device = catalog.catalog_device(f"tpu-{generation}")
        assert device.usable_bytes / 2**30 == pytest.approx(usable, abs=0.005)
    assert catalog.catalog_device("tpu-7x").usable_bytes / 2**30 == pytest.approx(94.74, abs=0.005)


def test_a_precision_without_hardware_has_the_rate_it_falls_back_to() -> None:
    t4 = catalog.catalog_device("t4").peak_flops
    assert t4["bf16"] == t4["tf32"] == t4["fp32"] < t4["fp16"]
    tpu = catalog.catalog_device("tpu-v5e").peak_flops
    assert tpu["fp16"] == tpu["bf16"] == 197e12


def test_an_unknown_device_names_the_nearest() -> None:
    assert 'did you mean "rtx-4090"' in str(error_of(changed(device__name="rtx4090")))
    assert 'did you mean "cuda:0"' in str(error_of(changed(device__name="cuda0")))
    assert "tpu-v5e" in str(error_of(changed(device__name="???")))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("auto", None), ("cpu", "cpu"), ("cuda", "gpu"), ("cuda:3", "gpu"), ("mps", "apple")],
)
def test_local_devices_have_a_kind(name: str, kind: str | None) -> None:
    assert device_kind(name) == kind


# datasets


def data_at(source: str | Path) -> Any:
    return catalog.dataset(changed(data__source=str(source)))


def test_the_standard_library_is_real_python_source_in_a_fixed_order() -> None:
    files = stdlib.files()
    root = stdlib.directory()
    relative = [path.relative_to(root).as_posix() for path in files]
    assert relative == sorted(relative)
    assert "ast.py" in relative
    assert not [name for name in relative if "site-packages" in name or "/test/" in f"/{name}"]
    entry = catalog.dataset(Plan())
    assert entry.documents == len(files) > 300
    assert entry.bytes == sum(path.stat().st_size for path in files) > 3_000_000
    assert entry.tokens == pytest.approx(entry.bytes / 3.4, rel=0.01)


def test_a_standard_library_without_sources_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stdlib, "directory", lambda: tmp_path)
    sources._standard_library.cache_clear()
    try:
        assert "no source files" in str(error_of(Plan()))
    finally:
        sources._standard_library.cache_clear()


def test_hub_datasets_by_name_and_by_address() -> None:
    by_name = data_at("tinystories")
    by_address = data_at("hf://roneneldan/TinyStories")
    assert by_name.where == by_address.where == "roneneldan/TinyStories"
    assert by_address.documents == 2_119_719
    other = data_at("hf://someone/else.text/part-1")
    assert (other.kind, other.where, other.config) == ("hub", "someone/else.text", "part-1")
    assert other.bytes is None
    assert other.tokens is None
    assert data_at("hf://datasets/someone/else").where == "someone/else"
    assert data_at("wikitext-2").config == "wikitext-2-raw-v1"


@pytest.mark.parametrize("source", ["hf://", "hf://one", "hf://a/b/c/d", "hf://a/b c", "hf:///x"])
def test_a_malformed_hub_address_says_how_it_is_written(source: str) -> None:
    assert "hf://owner/name" in str(error_of(changed(data__source=source)))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.txt", "text"), ("a.md", "text"), ("input", "text"), ("a.jsonl", "jsonl"), ("a.JSON", "json"),
        ("a.csv", "csv"), ("a.tsv", "csv"), ("a.parquet", "parquet"), ("a.h5", "hdf5"),
    ],
)  # fmt: skip
def test_a_file_is_known_by_its_suffix_and_measured_without_reading(
    tmp_path: Path, name: str, form: str
) -> None:
    path = tmp_path / name
    path.write_bytes(b"x" * 3600)
    entry = data_at(path)
    assert (entry.kind, entry.format, entry.bytes) == ("file", form, 3600)
    assert entry.where == str(path)
    assert (entry.tokens is None) == (form == "hdf5")


def test_a_folder_counts_what_the_trainer_would_read(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    (tmp_path / "deep" / "a.jsonl").write_text("12345")
    entry = data_at(tmp_path)
    assert (entry.format, entry.documents, entry.bytes) == ("directory", 1, 5)
    (tmp_path / "README.md").write_text("123")
    (tmp_path / "image.png").write_text("1234567")
    os.utime(tmp_path, ns=(1, 1))
    entry = data_at(tmp_path)
    assert (entry.documents, entry.bytes) == (1, 5)
    (tmp_path / "deep" / "a.jsonl").rename(tmp_path / "deep" / "a.jsonl.old")
    os.utime(tmp_path, ns=(2, 2))
    entry = data_at(tmp_path)
    assert (entry.documents, entry.bytes) == (1, 3)
    (tmp_path / "table.parquet").write_text("1234567")
    (tmp_path / "b.md").write_text("12")
    os.utime(tmp_path, ns=(3, 3))
    with pytest.raises(PlanError, match=r"several kinds \(1 \.parquet, 1 text\)"):
        data_at(tmp_path)


def test_a_huge_folder_has_no_known_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(12):
        (tmp_path / f"{n}.txt").write_text("x")
    monkeypatch.setattr(folders, "MOST_FILES", 10)
    entry = data_at(tmp_path)
    assert entry.bytes is None
    assert entry.tokens is None


def test_data_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    for name, content in (("a.zip", "x"), ("b.pt", "x"), ("empty.txt", "")):
        (tmp_path / name).write_text(content)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe.txt")
    for name, reason in (
        ("a.zip", ".zip is not text"),
        ("b.pt", ".pt is not text"),
        ("empty.txt", "empty"),
        ("folder", "holds no text files"),
        ("pipe.txt", "neither a file nor a folder"),
        ("missing.txt", "no such file"),
    ):
        error = error_of(changed(data__source=str(tmp_path / name)))
        assert reason in str(error)
        assert error.key == "data.source"


def test_a_mistyped_dataset_is_told_the_nearest_or_the_hub_form() -> None:
    assert 'did you mean "tinystories"' in str(error_of(changed(data__source="tinystory")))
    assert '"hf://someone/texts"' in str(error_of(changed(data__source="someone/texts")))
    assert str(error_of(changed(data__source="/x/openwebtxt"))).endswith(
        'no such file or folder — did you mean "openwebtext"?'
    )
    assert str(error_of(changed(data__source="/openwebtxt.md"))).endswith("no such file or folder")


@pytest.mark.parametrize("source", ["", "a\0b", "x" * 9000, "~nobody-here/x"])
def test_sources_that_cannot_be_paths_are_plan_errors(source: str) -> None:
    plan = Plan(data=DataChoice(source=source))
    with pytest.raises(PlanError):
        catalog.dataset(plan)


# presets


@pytest.mark.parametrize("name", sorted(catalog.presets()))
def test_every_preset_can_be_priced(name: str) -> None:
    plan = catalog.preset(name)
    check(plan)
    assert catalog.presets()[name].source


def test_presets_are_those_of_the_guides() -> None:
    ram = {name: catalog.preset(name) for name in ("limited-ram", "medium-ram", "high-ram", "tpu")}
    assert [p.train.batch_size for p in ram.values()] == [8, 32, 64, 128]
    assert [p.optimize.accumulation_steps for p in ram.values()] == [8, 4, 2, 1]
    assert [p.data.shuffle_buffer for p in ram.values()] == [5_000, 10_000, 50_000, 100_000]
    assert [p.optimize.precision for p in ram.values()] == ["bf16", "bf16", "fp32", "bf16"]
    assert ram["limited-ram"].optimize.optimizer == "adamw-8bit"
    gearhead = {name: catalog.preset(name) for name in ("nvidia", "amd-rocm", "apple")}
    assert [p.train.batch_size for p in gearhead.values()] == [8, 2, 4]
    assert [p.data.sequence_length for p in gearhead.values()] == [1024, 512, 512]
    assert {p.effective_batch for p in gearhead.values()} == {32}
    assert [p.optimize.gradient_checkpointing for p in gearhead.values()] == [
        "none",
        "full",
        "full",
    ]


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(PlanError, match='did you mean "limited-ram"'):
        catalog.preset("limited_ram")


# combinations


@pytest.mark.parametrize(
    ("settings", "key", "words"),
    [
        ({"model.name": "gpt2", "data.sequence_length": 1025}, "data.sequence_length", "1,024"),
        ({"backend": "jax", "device.name": "mps"}, "device.name", "backend = torch"),
        ({"backend": "jax", "device.name": "m4-16gb"}, "device.name", "backend = torch"),
        ({"device.name": "tpu"}, "device.name", "backend = jax"),
        ({"device.name": "tpu-v5e"}, "device.name", "backend = jax"),
        ({"optimize.freeze_base": True}, "optimize.freeze_base", "optimize.lora_rank"),
        ({"data.stride": 129}, "data.stride", "128"),
        ({"model.name": "gpt2", "model.target_params": 10**6}, "model.target_params", "stories"),
        ({"model.name": "gpt2", "data.vocab_size": 60_000}, "data.vocab_size", "50,257"),
        ({"model.target_params": 500_000, "data.vocab_size": 50_000}, "model.target_params", "fits"),
    ],
)  # fmt: skip
def test_an_impossible_combination_names_key_and_what_is_allowed(
    settings: dict[str, Any], key: str, words: str
) -> None:
    error = error_of(replace(Plan(), settings))
    assert error.key == key
    assert str(error).startswith(f"{key} = ")
    assert words in str(error)


@pytest.mark.parametrize(
    "settings",
    [
        {"model.name": "gpt2", "data.sequence_length": 1024},
        {"model.name": "gpt2", "data.vocab_size": 300},
        {"backend": "jax", "device.name": "rx-6750-xt-12gb"},
        {"backend": "jax", "device.name": "tpu:0"},
        {"optimize.lora_rank": 8, "optimize.freeze_base": True},
        {"optimize.optimizer": "adamw-8bit", "optimize.optimizer_offload": "pinned"},
        {"optimize.activation_offload": True, "optimize.precision": "fp16"},
        {"data.stride": 128},
        {"train.warmup_steps": 1000, "train.max_steps": 10},
        {"device.name": "h100-80gb", "device.count": 8, "optimize.sharding": "fsdp"},
        {"device.memory_fraction": 0.5},
    ],
)
def test_a_possible_combination_passes(settings: dict[str, Any]) -> None:
    check(replace(Plan(), settings))


@pytest.mark.parametrize("name", ["stories", "gearhead", "gpt2", "llama-3.2-1b"])
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_every_toggle_of_every_model_leads_to_a_plan_that_can_be_priced(
    name: str, backend: str
) -> None:
    plan = replace(Plan(), {"model.name": name, "backend": backend})
    for row in OPTIMIZATIONS:
        seen = plan
        for _ in row.values(plan):
            seen = row.apply(seen, row.next_value(seen))
            if conflict(seen) is None:
                check(seen)
        assert row.value(seen) == row.value(plan), "a toggle comes round"


def test_loading_the_catalogs_imports_no_heavy_package() -> None:
    code = (
        "import sys; from memconsole.plan import catalog, check; check.check(catalog.preset('nvidia')); "
        "heavy = {'numpy', 'torch', 'jax', 'huggingface_hub', 'datasets', 'tokenizers', 'textual'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
