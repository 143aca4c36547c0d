"""Names that an option accepts, where users may register further ones."""

from typing import Final

from lightning_moe.config.checks import check_choices


class OptionNames:
    """The names that one option accepts: the package's own, and those that a registry of a higher layer adds.

    Args:
        option: full name of the option.
        own: the package's own names.
    """

    def __init__(self, option: str, own: tuple[str, ...]) -> None:
        self.option: Final = option
        self._names = list(own)

    def add(self, name: str) -> None:
        """Accept `name` from now on.

        Raises:
            ValueError: if the name is taken.
        """
        if name in self._names:
            raise ValueError(
                f"{self.option}={name!r} is registered already; register under another name"
            )
        self._names.append(name)

    def check(self, name: object) -> None:
        """Check the value of the option.

        Raises:
            ValueError: if it is none of the names.
        """
        section, _, field = self.option.rpartition(".")
        check_choices(section, tuple(self._names), **{field: name})
