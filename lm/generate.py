"""Write text with a trained model.

python -m lm.generate checkpoint=runs/NAME prompt="the method" samples=3
"""

from lm.config.command_line import command
from lm.config.commands import GenerateConfig


def main(config: GenerateConfig, overrides: list[str]) -> None:  # noqa: ARG001
    from lm.inference.generation import generate  # torch is imported here, so that --help and mistakes answer at once
    from lm.runs.assembly import open_checkpoint

    assert config.checkpoint is not None
    model, vocabulary, run = open_checkpoint(config.checkpoint, device=config.device)
    generate(model, vocabulary, data=run.data, config=config)


if __name__ == "__main__":
    command(main, name="generate", schema=GenerateConfig)
