"""The packages of the wheel; everything else is in pyproject.toml. The configs of conf/ travel as lm/conf/."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["lm*"]), "lm.conf"], package_dir={"lm.conf": "conf"})
