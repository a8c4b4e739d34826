"""The ``compile`` block of a config: torch.compile of each block of a model, without a fallback to eager."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class CompileSettings:
    """The keys of the block; ``None`` leaves the choice to torch."""

    enabled: bool = False
    backend: str = "inductor"
    mode: str | None = None
    fullgraph: bool = True
    dynamic: bool | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def apply(self, modules: Iterable[nn.Module]) -> None:
        """Compile each of ``modules`` in place, which keeps parameter names.

        A module that does not compile raises, and so does one that is compiled too often; with ``fullgraph`` false,
        torch runs it eagerly.

        Raises:
            ValueError: ``mode`` or ``options`` is given for another backend than inductor, which would ignore it.
        """
        if not self.enabled:
            return
        if self.backend != "inductor" and (self.mode or self.options):
            raise ValueError(
                f"compile.mode is {self.mode!r} and compile.options is {self.options} with compile.backend "
                f"{self.backend!r}; both are inductor's alone"
            )
        # Torch takes a mode or options, and options that are empty count as options.
        keywords = asdict(self) | {"options": self.options or None}
        del keywords["enabled"]
        for module in modules:
            module.compile(**keywords)
