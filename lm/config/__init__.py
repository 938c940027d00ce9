"""The schema of the commands and groups; plug-ins declare their own settings beside their classes.

These dataclasses define the keys, their types and their defaults; YAML files in `conf/` hold what differs. A group with
variants (`data=...`, `output=...`) has one dataclass per variant, found by the variant's `name`. Rules for one field
are in its annotation; rules for several are in the class's `problems`.

Nothing here imports torch, so settings load quickly.
"""
