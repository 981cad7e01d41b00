"""Which decoder layers run in which pipeline stage: pure arithmetic on a configuration.

A stage is a run of layers between two messages. With p ranks and v chunks on each there are p * v stages; chunk c of
rank r is stage c * p + r. The embedding belongs to the first stage, output layer and loss to the last.

    num_layers=8, p=2, v=2        rank 0: layers 0 1 | 4 5     rank 1: layers 2 3 | 6 7

A split is, in order of precedence: spelled out (`pipeline_model_parallel_layout`), given for the first or last rank, or
even, with embedding and loss counted as a layer if that was asked for.
"""

import re
from typing import Any, NamedTuple

VPP = "virtual_pipeline_model_parallel_size"
_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_ACCOUNT = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_LAYOUT = "pipeline_model_parallel_layout"
_PER_CHUNK = "num_layers_per_virtual_pipeline_stage"


class LayoutProblem(NamedTuple):
    """Why the layers cannot be dealt out."""

    fields: str
    """Fields of the configuration, separated by spaces."""
    constraint: str
    remedy: str


def stage_layers(config: Any) -> list[range]:
    """Return the global layers of each stage, counted from 0, in pipeline order.

    The configuration has been checked: what `layout_problem` reports is an error here.
    """
    counts = _split(config)
    assert isinstance(counts, list), f"no split of the layers: {counts}"
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def num_chunks(config: Any) -> int:
    """Chunks of layers on each pipeline rank."""
    return config.virtual_pipeline_model_parallel_size or 1


def derive_num_chunks(config: Any) -> None:
    """Fill the number of chunks from the layout, or from the layers in each chunk; what does not divide stays open."""
    ranks = max(config.pipeline_model_parallel_size, 1)
    if config.pipeline_model_parallel_layout is not None:
        stages, source = len(expand_layout(config.pipeline_model_parallel_layout).split("|")), _LAYOUT
    elif config.num_layers_per_virtual_pipeline_stage:
        stages, rest = divmod(_counted_layers(config), config.num_layers_per_virtual_pipeline_stage)
        source = f"num_layers {_PER_CHUNK}"
        if rest:
            return
    else:
        return
    if stages % ranks == 0 and stages > ranks:
        config.fill(VPP, stages // ranks, source)


def expand_layout(text: str) -> str:
    """Write out the repetitions: "Et*3|(tt|)*2L" becomes "Ettt|tt|tt|L"; commas and blanks are cosmetic."""
    text = re.sub(r"[,\s]", "", text)
    while (group := re.search(r"\(([^()]*)\)\*(\d+)", text)) is not None:
        text = text[: group.start()] + group[1] * int(group[2]) + text[group.end() :]
    return re.sub(r"([^()*\d])\*(\d+)", lambda match: match[1] * int(match[2]), text)


def layout_problem(config: Any) -> LayoutProblem | None:
    """What keeps the layers from being dealt out, with a split that works; None if nothing does."""
    per_chunk = config.num_layers_per_virtual_pipeline_stage or 1
    if min(config.num_layers, config.pipeline_model_parallel_size, num_chunks(config), per_chunk) < 1:
        return None
    clash = _clash(config)
    if clash is not None:
        return clash
    counts = _split(config)
    return counts if isinstance(counts, LayoutProblem) else None


def _clash(config: Any) -> LayoutProblem | None:
    """Two ways to split that exclude each other."""
    uneven = [name for name in (_FIRST, _LAST) if getattr(config, name) is not None]
    account = [name for name in _ACCOUNT if getattr(config, name)]
    spelled = [_LAYOUT] if config.pipeline_model_parallel_layout is not None else []
    per_chunk = [_PER_CHUNK] if config.num_layers_per_virtual_pipeline_stage is not None else []
    for first, second in ((uneven, account), (spelled, uneven + account + per_chunk), (uneven, per_chunk)):
        if first and second:
            return LayoutProblem(" ".join(first + second), "each says how layers are split", "give one of them")
    if config.pipeline_model_parallel_layout is not None and num_chunks(config) > 1:
        stages = len(expand_layout(config.pipeline_model_parallel_layout).split("|"))
        if stages != config.pipeline_model_parallel_size * num_chunks(config):
            names = f"{_LAYOUT} {VPP} pipeline_model_parallel_size"
            return LayoutProblem(names, f"the layout has {stages} stages", "give the layout alone")
    return None


def _split(config: Any) -> list[int] | LayoutProblem:
    """Layers of each stage, or why there is no split."""
    if config.pipeline_model_parallel_layout is not None:
        return _spelled_out(config)
    if getattr(config, _FIRST) is not None or getattr(config, _LAST) is not None:
        return _uneven(config)
    return _even(config)


def _counted_layers(config: Any) -> int:
    return config.num_layers + sum(bool(getattr(config, name)) for name in _ACCOUNT)


def _even(config: Any) -> list[int] | LayoutProblem:
    ranks = config.pipeline_model_parallel_size
    chunk_size = config.num_layers_per_virtual_pipeline_stage
    stages = ranks * num_chunks(config)
    per_stage, rest = divmod(_counted_layers(config), stages)
    if not rest and per_stage == (chunk_size or per_stage) > 0:
        counts = [per_stage] * stages
        counts[0] -= config.account_for_embedding_in_pipeline_split
        counts[-1] -= config.account_for_loss_in_pipeline_split
        return counts
    names = ["num_layers", "pipeline_model_parallel_size"]
    names += [name for name in (_PER_CHUNK, *_ACCOUNT) if getattr(config, name)]
    if chunk_size is None and num_chunks(config) > 1:
        names.append(VPP)
    unit, what = (ranks * chunk_size, f"chunks of {chunk_size}") if chunk_size else (stages, f"{stages} equal stages")
    extra = _counted_layers(config) - config.num_layers
    fewer = _counted_layers(config) // unit * unit - extra
    numbers = " or ".join(str(count) for count in (fewer, fewer + unit) if count > 0)
    why = f"{_counted_layers(config)} layers cannot be dealt out in {what} on each of {ranks} ranks"
    if not chunk_size:
        why = f"{_counted_layers(config)} layers do not divide into {what}"
    return LayoutProblem(" ".join(names), why, f"set --num-layers {numbers}, or {_spell_out(config, stages)}")


def _spell_out(config: Any, stages: int) -> str:
    """The flag that splits these very layers, and the given flags that it replaces."""
    spellings = {
        VPP: "--num-virtual-stages-per-pipeline-rank",
        _FIRST: "--decoder-first-pipeline-num-layers",
        _LAST: "--decoder-last-pipeline-num-layers",
        **{name: "--" + name.replace("_", "-") for name in (_PER_CHUNK, *_ACCOUNT)},
    }
    given = [flag for name, flag in spellings.items() if getattr(config, name) and name not in config.origins]
    if config.num_layers < config.pipeline_model_parallel_size - 1:
        return f"--pipeline-model-parallel-size {config.num_layers}"
    if stages > config.num_layers + 2 and VPP not in config.origins:
        return f"lower {spellings[VPP]}"
    layout = f"--pipeline-model-parallel-layout '{_balanced(config.num_layers, stages)}'"
    return f"{layout} instead of {' '.join(given)}" if given else layout


def _balanced(num_layers: int, stages: int) -> str:
    """A layout of `stages` stages whose sizes differ by one at most; the last ones, the first one are smaller."""
    least, more = divmod(num_layers, stages)
    parts = ["t" * (least + (stage < more)) for stage in range(stages)]
    return "E" + "|".join(parts) + "L"


def _uneven(config: Any) -> list[int] | LayoutProblem:
    """Given layers on the first or last rank, equal shares on the others, each cut into the rank's chunks."""
    ranks, chunks = config.pipeline_model_parallel_size, num_chunks(config)
    first, last = config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage
    names = " ".join(name for name in (_FIRST, _LAST) if getattr(config, name) is not None)
    names += " num_layers pipeline_model_parallel_size"
    others = ranks - (first is not None) - (last is not None)
    left = config.num_layers - (first or 0) - (last or 0)
    if ranks == 1 or min(first or 0, last or 0, left) < 0 or (left if others == 0 else left % others):
        remedy = "drop the flag" if ranks == 1 else f"use {_spell_out(config, ranks * chunks)}"
        return LayoutProblem(names, f"{left} layers are left for {others} equal ranks", remedy)
    middle = left // others if others else 0
    per_rank = [middle] * ranks
    per_rank[0] = middle if first is None else first
    per_rank[-1] = middle if last is None else last
    if any(count % chunks for count in per_rank):
        remedy = f"choose multiples of {chunks}, or use {_spell_out(config, ranks * chunks)}"
        return LayoutProblem(f"{names} {VPP}", f"ranks of {per_rank} layers do not divide into chunks", remedy)
    return [count // chunks for _ in range(chunks) for count in per_rank]


def _spelled_out(config: Any) -> list[int] | LayoutProblem:
    text = expand_layout(config.pipeline_model_parallel_layout)
    stages = text.split("|")
    ranks = config.pipeline_model_parallel_size
    letters = text.replace("|", "")
    unknown = sorted(set(letters) - set("EtmL"))
    num_heads = getattr(config, "mtp_num_layers", None) or 0
    problem = None
    if unknown:
        problem = f"{' '.join(unknown)} is none of E (embedding), t (decoder layer), m (MTP layer), L (loss), |, *n, ()"
    elif len(stages) % ranks:
        problem = f"it has {len(stages)} stages, no multiple of the {ranks} ranks"
    elif letters.count("E") != 1 or not stages[0].startswith("E"):
        problem = "it begins with the one E"
    elif letters.count("L") != 1 or not stages[-1].endswith("L"):
        problem = "it ends with the one L"
    elif letters.count("t") != config.num_layers:
        problem = f"it has {letters.count('t')} t for {config.num_layers} layers"
    elif letters.count("m") != num_heads:
        problem = f"it has {letters.count('m')} m for {num_heads} MTP layers"
    elif idle := [rank for rank in range(ranks) if not "".join(stages[rank::ranks])]:
        problem = f"rank {idle[0]} has nothing to do"
    if problem is None:
        return [stage.count("t") for stage in stages]
    remedy = f"use for instance '{_balanced(config.num_layers, max(len(stages) // ranks, 1) * ranks)}'"
    return LayoutProblem(f"{_LAYOUT} num_layers pipeline_model_parallel_size", problem, remedy)
