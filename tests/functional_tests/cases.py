"""The functional test cases: Megatron's files read, and the command line that its runner would make of them."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from .golden import DEFAULT_METRICS

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """One product of a recipe.

    Attributes:
        name: of the test case.
        model: the folder of its family.
        gpus: processes to start.
        environment, platform: which golden values are meant.
        config: the content of ``model_config.yaml``.
        values: a folder of golden values other than those beside the case.
    """

    name: str
    model: str
    gpus: int
    environment: str
    platform: str
    config: dict[str, Any]
    values: Path | None = None

    @property
    def golden_values(self) -> Path:
        """Where its golden values are, or go."""
        folder = folder_of(self.model, self.name) if self.values is None else self.values / self.name
        return folder / f"golden_values_{self.environment}_{self.platform}.json"

    @property
    def steps(self) -> int:
        """Training steps."""
        return int(self.config["MODEL_ARGS"]["--train-iters"])

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics to compare."""
        return tuple(self.config.get("METRICS", DEFAULT_METRICS))

    @property
    def approximate(self) -> bool:
        """Whether the case allows algorithms that are not deterministic."""
        variables = self.config["ENV_VARS"]
        names = ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NON_DETERMINSTIC_RESULTS")  # Megatron's spelling
        return any(str(variables.get(name, 0)) == "1" for name in names)

    def environment_variables(self) -> dict[str, str]:
        """What the case sets."""
        return {name: str(value) for name, value in self.config["ENV_VARS"].items()}

    def arguments(self, paths: dict[str, str]) -> list[str]:
        """The options of the training script.

        Args:
            paths: the values of ``${NAME}`` in the config.

        Raises:
            KeyError: for a name that is not in ``paths``.
        """
        words: list[str] = []
        for option, value in self.config["MODEL_ARGS"].items():
            words.append(option)
            if value is not True:
                words += [re.sub(r"\$\{(\w+)\}", lambda match: paths[match[1]], word) for word in _words(value)]
        return words


def _words(value: Any) -> list[str]:
    """``[a b]`` is several words, anything else one."""
    if isinstance(value, list):
        return [word for item in value for word in str(item).split()]
    return [str(value)]


def folder_of(model: str, name: str) -> Path:
    """The folder of a test case."""
    return HERE / "test_cases" / model / name


def load_cases(golden_values: Path | None = None) -> dict[str, Case]:
    """All cases of all recipes, by name.

    Args:
        golden_values: a folder of golden values, if not those beside the cases are meant.
    """
    found = {}
    for recipe in sorted((HERE / "recipes").rglob("*.yaml")):
        spec = yaml.safe_load(recipe.read_text())
        for entry in spec["products"]:
            for product in entry["products"]:
                for values in itertools.product(*product.values()):
                    chosen = spec["spec"] | dict(zip(product, values, strict=True))
                    case = _case(entry["test_case"][0], chosen)
                    found[case.name] = replace(case, values=golden_values)
    return found


def _case(name: str, spec: dict[str, Any]) -> Case:
    config = yaml.safe_load((folder_of(spec["model"], name) / "model_config.yaml").read_text())
    return Case(name, spec["model"], spec["gpus"], spec["environment"], spec["platforms"], config)
