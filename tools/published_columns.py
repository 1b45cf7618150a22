"""Strict columns of published runs from what a source wrote: python tools/published_columns.py RUNS.csv --out NEW.csv

`autopar validate` reads words and units (benchmarks/data/README.md). This tool writes them of the texts `inter_link`,
`framework`, `attn_impl`, `zero_detail`, `optimizer`, `precision`, `tflops_kind` and of names in `model`. A stated cell
stays. The tool prints what is not clear.
"""

import argparse
import contextlib
import csv
import math
import re
from pathlib import Path

from autopar.cost_model.machine.engine import NEUTRAL, Engine, engine_named, engines
from autopar.cost_model.published.row import COLUMNS, ROW_PRECISIONS
from autopar.cost_model.work.block_work import family_names
from autopar.errors import ClusterError
from autopar.ir.device_presets import device_preset, device_presets

# a count of ports, a rate, and what it is of: "8x NDR InfiniBand 400Gb/s per node"
_LINK = re.compile(
    r"(?:(\d+) ?[x×] ?[^,;\d]*)?(?<![\d.])(\d+(?:\.\d+)?) ?([GT])(b|B)(?:/s|ps|it/s)\b(?:[^,;]*?\bper (\w+))?"
)
_PORT_GBIT = {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}  # InfiniBand Trade Association, 4 lanes
_DEVICES, _HOSTS = ("gpu", "device", "rank"), ("node", "host", "server", "instance")

# Pattern and precision, the first match counts. Case does not count.
_PRECISIONS = (
    (r"nv-?fp4", "nvfp4"),
    (r"mx-?fp4|\bfp4|float4|4[ -]?bit", "mxfp4"),
    (r"mx-?fp8", "mxfp8"),
    (r"fp8|float8|e4m3|e5m2|8[ -]?bit float", "fp8"),
    (r"bf-?16|bfloat16", "bf16"),
    (r"fp-?16|float16|\bhalf\b|\bamp\b", "fp16"),
    (r"fp-?32|float32|\bsingle\b", "fp32"),
)
_OPTIMIZERS = (
    (r"8[- ]?bit", "adamw8bit"),
    (r"adafactor", "adafactor"),
    (r"\bmuon\b", "muon"),
    (r"\blion\b|momentum", "sgd-momentum"),
    (r"\bsgd\b", "sgd"),
)
_SMALL_HEAD = r"squad|classif|head on [^;]*positions only"
PEFT_RANK, PEFT_TARGETS = "8", ("q_proj", "v_proj")  # of `peft.LoraConfig`, for models like Llama
_WORDS = re.compile(r"[a-z]+|[0-9]+")
_YEAR = re.compile(r"arxiv[: ]*([0-9]{2})(?:0[1-9]|1[0-2])\.[0-9]{4,5}|\b(20[12][0-9])\b", re.IGNORECASE)

_LIKE = r"in-?house|\b(?:own|custom|proprietary|internal)\b|[ -](?:style|like|based|inspired)\b|\bsimilar to\b"
_NO_COMPILE = r"\beager\b|\b(?:no|not|without)[ -](?:torch[. -]?)?compil|compile ?[:=]? ?(?:no|off|false)\b"
_OVERLAP = r"(?:async(?:hronous)?[ -]?(?:tp\b|tensor)|\b(?:tp|tensor)[ -](?:comm[a-z]*[ -])?overlap|userbuffers)"
_GRAPHS = r"full[ -]iteration (?:cuda )?graph|cuda[ -]?graphs?\b"
_LINEAR_LOSS = r"linear[ -]?cross[ -]?entropy|liger|cut[ -]?cross[ -]?entropy"
_ON_HOST = (
    (
        "parameters",
        r"zero-?infinity|offload\w*[ _:=-]*(?:the )?(?:param|weight)|(?:param\w*|weights?)[ _-]*(?:cpu )?offload",
    ),
    (
        "optimizer",
        r"zero-?offload|cpu[ _-]?(?:adam|offload)|(?:optimi[sz]er|adam|states?)[ _-]*(?:cpu )?offload|"
        r"offload\w*[ _:=-]*(?:the )?optim|optimi[sz]er (?:states? )?on (?:the )?(?:host|cpu)",
    ),
    ("activations", r"activation\w*[ _-]*(?:cpu )?offload|offload\w*[ _:=-]*(?:the )?activ"),
)
_NOT_ON_HOST = r"\b(?:no|not|without)[ _-](?:\w+[ _-])?offload|offload\w*[ ]?[:=][ ]?(?:none|no|false|off)\b"
_IN_PIECES = r"unfused|not fused|\b(?:no|without) (?:flash|fused)|eager|\bmath\b|materiali[sz]ed|\bnaive\b"
_VERSION = r"(?:flash[ -]?att(?:ention|n)?|flash|fa)[ -]?v?"
_KERNELS = (
    (rf"cudnn|{_VERSION}[34]\b|transformer[ -]?engine|\bte\b|\baiter\b|\bck\b", "native"),
    (rf"{_VERSION}2\b|\bsdpa\b", "second"),
    (rf"{_VERSION}1\b|triton|xformers", "first"),
)
_WHOLE = (
    r"(?:full|whole|dense) attention|attention (?:in full|whole)|non-?causal|not halved|s/6h|(?:96|72) ?\*?bsl|palm"
)
# beginnings of model names, longest first, for architectures with equal columns
_FAMILIES = {
    "gpt-neox": "gpt-neox", "nemotron": "nemotron", "mixtral": "mixtral", "mistral": "mistral", "falcon": "falcon",
    "pythia": "pythia", "qwen3": "qwen3", "phi-3": "phi3", "gemma": "gemma2", "qwen": "qwen2", "mpt": "mpt",
    "opt": "opt", "bert": "bert", "roberta": "bert",
}  # fmt: skip
_NOT_GATED = ("bert", "mpt", "nemotron", "opt", "gpt-neox", "pythia", "falcon")


def precision_of(text: str) -> str:
    """A word of `PRECISIONS`, or nothing."""
    if text in ROW_PRECISIONS:
        return text
    return next((word for pattern, word in _PRECISIONS if re.search(pattern, text, re.IGNORECASE)), "")


def gpu_type_of(text: str) -> str:
    """A text that names a preset, or the last preset whose name begins with the same letters and number, or nothing."""
    with contextlib.suppress(ClusterError):
        return text if device_preset(text) else ""
    begin = re.match(r"[a-z]+[0-9]+[a-z]?", text.lower())
    names = sorted(name for name in device_presets() if begin and re.split(r"[-.]", name)[0] == begin[0])
    return names[-1] if names else ""


def engine_of_framework(framework: str, source: str = "") -> Engine | None:
    """The engine that a text names: by the longest name, then by the first year in `framework`, else in `source`."""
    text = " ".join(_WORDS.findall(framework.lower()))
    matches = [
        (len(name), engine)
        for engine in engines().values()
        for name in engine.frameworks
        if re.search(r"\b" + " ?".join(_WORDS.findall(name.lower())) + r"\b", text)
    ]
    if re.search(r"\bplain (?:py)?torch\b", text):  # a script that only names where it comes from
        return None
    if any("deepspeed" in engine.name for _, engine in matches):  # a trainer of another library runs it
        matches = [match for match in matches if "deepspeed" in match[1].name]
    year = math.inf
    if stated := _YEAR.search(framework) or _YEAR.search(source):
        year = int(stated[2] or f"20{stated[1]}")
    longest = max((length for length, _ in matches), default=0)
    ages = [(e.last_year < year, abs(e.last_year - year), e.name) for length, e in matches if length == longest]
    return engine_named(min(ages)[-1]) if ages else None


def options_of(engine: Engine, text: str, attention: str) -> dict[str, str]:
    """The columns of mechanisms that texts state and the engine does not have."""
    words, found = text.lower(), dict[str, str]()
    if re.search(_NO_COMPILE, words):
        found = {"pointwise": "eager", "dispatch": "eager", "loss": "eager"}
    elif re.search(r"compile|inductor", words):
        found = {"pointwise": "fused", "dispatch": "lean" if engine.dispatch == "eager" else engine.dispatch}
        found |= {"loss": "compiled"} if engine.name == NEUTRAL else {}  # a script compiles its model with the loss
    if re.search(_OVERLAP, words):
        found["tensor_overlap"] = "none" if re.search(rf"\b(?:no|not|without) {_OVERLAP}", words) else "pipelined"
    if re.search(_GRAPHS, words) and not re.search(rf"\b(?:no|not|without|partial|some) (?:{_GRAPHS})", words):
        found["dispatch"] = "graph"
    if re.search(_LINEAR_LOSS, words):
        found["loss"] = "linear"
    on_host = [] if re.search(_NOT_ON_HOST, words) else [part for part, at in _ON_HOST if re.search(at, words)]
    if on_host:  # parameters include the optimizer
        found["offload"] = "+".join(part for part in on_host if part != "optimizer" or "parameters" not in on_host)
    if attention:
        kernel, pieces = re.search(r"\bsdpa\b", attention.lower()), re.search(_IN_PIECES, attention.lower())
        is_math = re.search(r"\bmath\b|eager|fused softmax", attention.lower())  # SDPA has a kernel for masks too
        found["attention"] = "materialised" if is_math or (pieces and not kernel) else "fused"
        kernels = (word for pattern, word in _KERNELS if re.search(pattern, attention.lower()))
        found["attention_kernel"] = next(kernels, engine.attention_kernel)
    return {name: word for name, word in found.items() if word != getattr(engine, name)}


def state_of(cells: dict[str, str], texts: str) -> dict[str, str]:
    """The columns of what is trained and of the optimizer's state that texts state."""
    columns, words = dict[str, str](), texts.lower()
    method, stored = cells.get("method", ""), cells.get("model_params_dtype", "")
    if method in ("lora", "qlora"):
        names = re.findall(r"[a-z_]+_proj|c_attn|query_key_value|dense\w*", cells.get("lora_targets", ""))
        every = re.search(r"\ball\b", cells.get("lora_targets", ""), re.IGNORECASE)
        bits = cells.get("base_bits", "")
        kind = "qlora" if method == "qlora" or bits in ("4", "8") else "lora"
        targets = "" if every else f",targets={'+'.join(names or PEFT_TARGETS)}"
        columns["trains"] = f"{kind}:r={cells.get('lora_r') or PEFT_RANK}{targets}" + ",bits=8" * (bits == "8")
    elif re.search(r"on lora adapters", words):
        columns["trains"] = f"lora:r={cells.get('lora_r') or PEFT_RANK},targets={'+'.join(PEFT_TARGETS)}"
    elif re.search(r"bfloat16|bf16|float16|fp16", stored) and "float32" not in stored:
        columns["stored"] = "fp16" if precision_of(stored) == "fp16" else "bf16"
    elif re.search(r"states? in the weights dtype|pure (?:bf|fp)16|all (?:bf|fp)16|galore", words):
        columns["stored"] = "fp16" if precision_of(cells["precision"]) == "fp16" else "bf16"
    kernel = cells.get("loss_kernel", "").lower()
    if re.search(_LINEAR_LOSS, kernel):
        columns["loss"] = "linear"
    elif re.search(r"fused|triton", kernel):
        columns["loss"] = "fused"
    kinds = (word for pattern, word in _OPTIMIZERS if re.search(pattern, words))
    columns["optimizer_state"] = next(kinds, "")
    if re.search(r"(?:in|during) (?:the )?backward|optimi[sz]er[- ]in[- ]b", words):
        columns["gradients"] = "stepped"
    return {name: word for name, word in columns.items() if word}


def memory_of(cells: dict[str, str]) -> dict[str, str]:
    """What a row's peak memory counts, and the peak in GiB."""
    kind = cells["mem_kind"].lower()
    if cells.get("memory_basis") or not cells["peak_mem_gb"]:
        return {}
    if peak := cells.get("mem_torch_peak_gib", ""):
        return {"memory_basis": "allocated", "peak_mem_gb": peak}
    columns = {"memory_basis": "allocated" if re.search(r"allocated|torch peak|max_memory", kind) else "device"}
    if re.match(r"gb \((?:1e9|mb/1000)", kind):
        columns["peak_mem_gb"] = f"{float(cells['peak_mem_gb']) * 1e9 / 2**30:.4g}"
    return columns


def family_of(cells: dict[str, str]) -> str:
    """The family that a model's name tells, or nothing where the other columns tell it."""
    starts = (family for start, family in _FAMILIES.items() if cells["model"].lower().startswith(start))
    name, is_gated = next(starts, ""), cells["gated_mlp"].lower() == "true"
    if cells["moe_experts"]:
        return (
            "qwen3-moe" if name == "qwen3" and not (cells["moe_shared_ffn"] or cells["attention_type"] == "mla") else ""
        )
    if not name or (name in _NOT_GATED) == is_gated:
        return ""
    if name == "mpt" and "torch" in cells["attn_impl"].lower():
        return "mpt-torch"
    return "falcon-mqa" if name == "falcon" and cells["n_kv_heads"] == "1" else name


def shard_ranks_of(detail: str, devices_per_host: str) -> str:
    """The ranks that ZeRO divides state over, or nothing where a text does not say."""
    if stated := re.search(r"groups of (\d+)|FSDP=(\d+)", detail):
        return stated[1] or stated[2]
    return (devices_per_host or "8") if "within node" in detail else ""


def link_gb_per_s(text: str, devices_per_host: float) -> tuple[float | None, str]:
    """GB/s of one device in one direction, and what is not clear. Ports without more words are of a host."""
    if not re.search("[GT]b", text):
        text = re.sub(rf"\b({'|'.join(_PORT_GBIT)})\b", lambda name: f"{_PORT_GBIT[name[1]]}Gb/s", text)
    rates = _LINK.findall(text)
    if len(rates) != 1:
        return None, "does not state one bandwidth" if re.search(r"\d", text) else ""
    count, number, prefix, unit, scope = rates[0]
    rate = float(number) * (1e3 if prefix == "T" else 1) / (8 if unit == "b" else 1) * float(count or 1)
    of = scope.lower().removesuffix("s")
    if not 0 < rate < math.inf or of not in ("", *_DEVICES, *_HOSTS):
        return None, "states a figure that cannot be read"
    gb_per_s = rate / devices_per_host if of in _HOSTS or (count and not of) else rate
    if of or count:
        return gb_per_s, ""
    return gb_per_s, f"does not say per port, device or host; read as {gb_per_s:g} GB/s per device"


def strict_cells(old: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The cells that `autopar validate` reads beside those of a row, and what is not clear in its texts."""
    cells = dict.fromkeys(COLUMNS, "") | old
    unclear, texts = list[str](), "; ".join(filter(None, (cells[n] for n in ("framework", "zero_detail", "optimizer"))))
    engine = engine_of_framework(cells["framework"], cells["source"])
    if cells["framework"] and engine is None:
        unclear.append(f"framework {cells['framework']!r} is not known")
    found = options_of(engine or engine_named(NEUTRAL), texts, cells["attn_impl"])
    found |= {"engine": engine.name if engine else "", "family": family_of(cells)} | state_of(cells, texts)
    if re.search(_SMALL_HEAD, f"{cells['framework']}; {cells['notes']}", re.IGNORECASE):
        found["head"] = "small"
    found |= (memory := memory_of(cells))
    if engine is not None and re.search(_LIKE, cells["framework"], re.IGNORECASE):
        found["engine_basis"] = "guessed"
        unclear.append(f"framework {cells['framework']!r} is only like engine {engine.name}")
    found |= {"precision": precision_of(cells["precision"])}
    if cells["precision"] and not found["precision"]:
        unclear.append(f"precision {cells['precision']!r} is not known")
    found["zero"] = cells["zero"] or ("1" if "distributed" in cells["optimizer"].lower() else "")
    found["shard_ranks"] = shard_ranks_of(cells["zero_detail"], cells["gpus_per_node"])
    found["gpu_type"], kind = gpu_type_of(cells["gpu_type"]), cells["tflops_kind"]
    if cells["gpu_type"] and not found["gpu_type"]:
        unclear.append(f"device {cells['gpu_type']!r} is not known")
    found["tflops_kind"] = next((word for word in ("model", "hardware") if kind.startswith(word)), "")
    if re.search(_WHOLE, kind, re.IGNORECASE):
        found["tflops_attention"] = "1"
    elif re.search(r"causal|halved?|triang|half", kind, re.IGNORECASE):
        found["tflops_attention"] = "0.5"
    if cells["inter_link"] and not cells["inter_gb_per_s"]:
        devices = device_preset(found["gpu_type"] or "a100").devices_per_host.value
        with contextlib.suppress(ValueError):
            devices = float(cells["gpus_per_node"])
        rate, doubt = link_gb_per_s(cells["inter_link"], devices)
        found["inter_gb_per_s"] = "" if rate is None else f"{rate:.12g}"
        unclear += [f"{cells['inter_link']!r} {doubt}"] if doubt else []
    read_again: tuple[str, ...] = ("precision", "tflops_kind", "gpu_type")
    read_again += () if cells["family"] in family_names() else ("family",)
    read_again += tuple(memory)
    kept = {name: old[name] for name in found if old.get(name) and name not in read_again}
    return found | kept, unclear


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("runs", type=Path, help="CSV file with texts in the columns of benchmarks/data")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    chosen = parser.parse_args()
    with chosen.runs.open(newline="") as file:
        reader = csv.DictReader(file)
        rows, header = list(reader), reader.fieldnames or []
    read = [strict_cells(cells) for cells in rows]
    stated = {name for cells, _ in read for name, cell in cells.items() if cell} | {"engine", *header}
    with chosen.out.open("w", newline="") as file:
        names = [*(name for name in COLUMNS if name in stated), *(name for name in header if name not in COLUMNS)]
        writer = csv.DictWriter(file, names, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(old | cells for old, (cells, _) in zip(rows, read, strict=True))
    print(*sorted({text for _, unclear in read for text in unclear}), sep="\n")


if __name__ == "__main__":
    main()
