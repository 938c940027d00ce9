"""The schema of the commands and groups; plug-ins declare their own settings beside their classes.

YAML files under `conf/` hold the values; these dataclasses say which keys exist and what they may be. A group that has
variants (`data=...`, `output=...`) has one dataclass per variant, found by the variant's `name`. Rules about one field
stand in its annotation; rules about several stand in the class's `problems`.

Nothing here imports torch, so that `--help` and a mistyped key answer at once.
"""
