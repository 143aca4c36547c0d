"""Imported once by the server that rank processes are forked from: shapes are checked in ranks."""

import importlib

from jaxtyping import install_import_hook

install_import_hook("lightning_moe", "beartype.beartype")

# After the hook: every rank inherits the checked package, and Lightning with it (6 s per rank otherwise).
importlib.import_module("lightning_moe.module")
