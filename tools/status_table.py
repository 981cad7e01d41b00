"""Render the status table of README.md from the rule tables: what works, what is not there yet, what is left out.

python tools/status_table.py            write the table between its markers
python tools/status_table.py --check    exit 1 if README.md does not hold what would be written
"""

import argparse
import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.core.configs.compat import NOT_YET  # noqa: E402
from megatron.core.configs.flag_spec import flag_specs  # noqa: E402
from megatron.core.configs.transformer import TransformerConfig  # noqa: E402
from megatron.training.argument_factory import TOPICS, build_parser  # noqa: E402
from megatron.training.flag_table import FEATURES, VALUES  # noqa: E402

BEGIN, END = "<!-- status table: begin -->", "<!-- status table: end -->"
TITLES = {"works": "works", "not_yet": "not yet", "refused": "left out", "no_effect": "accepted, no effect"}
SHOWN_FLAGS = 3


def collect() -> dict[str, dict[str, list[str]]]:
    """Flags by status and feature: {status: {feature: [flag or flag and value]}}."""
    table: dict[str, dict[str, list[str]]] = {status: {} for status in TITLES}
    seen: set[str] = set()
    for title, topic in TOPICS.items():
        owners = topic_of_field(topic)
        for spec in flag_specs(topic):
            if spec.dest not in seen:
                owner = owners[spec.field]
                name = title.lower() if owner is topic else described(owner)
                table["works"].setdefault(name, []).append(spec.spellings[0])
        seen.update(spec.dest for spec in flag_specs(topic))
    model = {spec.field: spec.spellings[0] for spec in flag_specs(TransformerConfig)}
    for rule in NOT_YET:
        table["not_yet"].setdefault(rule.feature, []).extend(f"{model[name]} > 1" for name in rule.fields.split())
    by_dest = {spec.dest: spec.spellings[0] for spec in build_parser().specs.values()}
    for row in VALUES:
        flags = [f"{by_dest[row.dest]} {value}" for value in row.values]
        table[row.status].setdefault(row.feature, []).extend(flags)
    for feature in FEATURES:
        flags = [spec.spellings[0] for spec in feature.flags]
        table[feature.status].setdefault(feature.name, []).extend(flags)
    return table


def topic_of_field(topic: type) -> dict[str, type]:
    """For each field the class that declares it: a topic may be assembled from others."""
    return {name: cls for cls in reversed(topic.__mro__) for name in inspect.get_annotations(cls)}


def described(topic: type) -> str:
    """What a topic is about: the first sentence of its docstring."""
    sentence = (topic.__doc__ or topic.__name__).split(".")[0].split(";")[0].split(":")[0]
    return sentence if sentence[1].isupper() or sentence[1].isdigit() else sentence[0].lower() + sentence[1:]


def render() -> str:
    """The table in Markdown."""
    lines = ["| status | feature | flags |", "|---|---|---|"]
    for status, features in collect().items():
        for feature, flags in features.items():
            listed = ", ".join(f"`{flag}`" for flag in flags[:SHOWN_FLAGS])
            more = len(flags) - SHOWN_FLAGS
            lines.append(f"| {TITLES[status]} | {feature} | {listed}{f' and {more} more' if more > 0 else ''} |")
    return "\n".join(lines)


def replaced(text: str, table: str) -> str:
    """README's text with the table between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"README.md: needs the markers {BEGIN} and {END}, once each")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def main(argv: list[str] | None = None) -> int:
    """Write or check the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="file that holds the markers")
    options = parser.parse_args(argv)
    text = options.readme.read_text(encoding="utf-8")
    wanted = replaced(text, render())
    if not options.check:
        options.readme.write_text(wanted, encoding="utf-8")
        return 0
    if text != wanted:
        print(f"{options.readme}: the status table is out of date; run python tools/status_table.py", file=sys.stderr)
    return int(text != wanted)


if __name__ == "__main__":
    raise SystemExit(main())
