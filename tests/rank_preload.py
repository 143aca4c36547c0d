"""Imported once by the server that rank processes are forked from: shapes are checked in ranks."""

from jaxtyping import install_import_hook

install_import_hook("lightning_moe", "beartype.beartype")

import lightning_moe  # noqa: E402 - after the hook; every rank inherits the checked package
import lightning_moe.module  # noqa: E402 - with Lightning itself: 6 s per rank otherwise
import lightning_moe.strategy  # noqa: E402, F401
