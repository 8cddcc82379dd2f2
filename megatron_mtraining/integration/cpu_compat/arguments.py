"""The Megatron options without which training on the CPU fails or is no use."""

from dataclasses import dataclass

OPTION = "--mtraining-cpu"


@dataclass(frozen=True)
class _Needed:
    """One option that CPU training needs: `value` None marks a plain flag."""

    flag: str
    value: str | None = None


# Fused kernels, pinned loader threads and GPU initialisation are off; gloo carries the collectives.
NEEDED = (
    _Needed("--transformer-impl", "local"),
    _Needed("--distributed-backend", "gloo"),
    _Needed("--num-workers", "0"),
    _Needed("--use-cpu-initialization"),
    _Needed("--no-persist-layer-norm"),
    _Needed("--no-gradient-accumulation-fusion"),
    _Needed("--no-masked-softmax-fusion"),
    _Needed("--no-bias-gelu-fusion"),
    _Needed("--no-bias-swiglu-fusion"),
    _Needed("--no-bias-dropout-fusion"),
    _Needed("--no-rope-fusion"),
)

# What cannot work without a GPU, whatever else is set.
IMPOSSIBLE = ("--fp8-format", "--fp4-format", "--tp-comm-overlap", "--cuda-graph-impl", "--use-nccl-ub")


def complete_arguments(argv: list[str]) -> list[str]:
    """`argv` with the options that CPU training needs, each added unless it is there.

    Raises:
        ValueError: an option in `argv` contradicts a needed one or cannot work without a GPU; the message names it.
    """
    given = _options(argv)
    for flag in IMPOSSIBLE:
        if flag in given:
            raise ValueError(f"{flag} does not work on the CPU: leave it out, or leave out {OPTION}")
    added: list[str] = []
    for needed in NEEDED:
        if needed.flag not in given:
            added += [needed.flag] if needed.value is None else [needed.flag, needed.value]
        elif needed.value is not None and given[needed.flag] != needed.value:
            wrong = f"{needed.flag} {given[needed.flag]}"
            raise ValueError(f"{wrong} does not work on the CPU: {OPTION} needs {needed.flag} {needed.value}")
    return argv + added


def _options(argv: list[str]) -> dict[str, str | None]:
    """Every `--flag` of a command line with the word that follows it (or stands after `=`), None if there is none."""
    found: dict[str, str | None] = {}
    for position, word in enumerate(argv):
        if not word.startswith("--"):
            continue
        flag, equals, value = word.partition("=")
        following = argv[position + 1] if position + 1 < len(argv) else "--"
        found[flag] = value if equals else (None if following.startswith("--") else following)
    return found
