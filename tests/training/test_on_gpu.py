"""Training, evaluation and inference on a GPU match the CPU; without a GPU, on an emulated one."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lm.config.groups import plugin_names
from lm.config.schema import TrainConfig
from lm.data.corpus import open_corpus
from lm.system.devices import pick_device, precision_name
from lm.system.tree import map_leaves
from lm.training.metrics import read_metrics
from lm.training.trainer import Trainer
from tests.conftest import TINY, Command, Tiny
from tests.helpers.emulated_cuda import Gpu, emulated_cuda
from tests.helpers.models import score_tokens
from tests.helpers.training import LAYERS, make_trainer, no_waiting_for_the_gpu
from tests.helpers.ways import CORES, MAXENT, WAYS

BF16 = "trainer.precision=bf16 trainer.micro_batches=3 model.dropout=0.2"
OPTIMIZERS = [
    "optim.embedding=rowwise",
    "optim.embedding=dense trainer.average=0.99",
    *(f"optim={name} optim.weight_decay=1e-4 trainer.average=0.99" for name in plugin_names("optim")),
]
VARIATIONS = [
    *LAYERS,
    "output=adaptive output.cutoffs=[10,20] output.shortlist=false",
    "output=adaptive output.cutoffs=[10,20] output.head_bias=true",
    *WAYS,
    *OPTIMIZERS,
]
ALL = [" ".join((layer, more)) for layer in LAYERS for more in (*CORES, *OPTIMIZERS)]


@pytest.fixture
def small(compose: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """TINY settings of one prepared corpus."""
    root = tmp_path_factory.getbasetemp() / "gpu"

    def make(*overrides: str) -> TrainConfig:
        config = compose(*TINY, "model.hidden_size=64", *overrides)
        config.data.root = str(root)
        return config

    return make


def check(small: Tiny, variation: str, *, tolerance: float) -> None:
    """Three steps; then saved state and averaged weights, on both devices; then another step and predictions."""
    config = small(*variation.split())
    corpus = open_corpus(config.data)
    gpu, batches = make_trainer(config, corpus, device="cuda", num_batches=4)
    cpu, same_batches = make_trainer(config, corpus, num_batches=4)
    for trainer, its_batches in ((gpu, batches), (cpu, same_batches)):
        trainer.step(its_batches[0])  # warm-up: loads kernels, allocates buffers
    with no_waiting_for_the_gpu():
        for batch in batches[1:3]:
            gpu.step(batch)
    for batch in same_batches[1:3]:
        cpu.step(batch)
    assert all(weight.is_cuda for weight in [*gpu.model.parameters(), gpu.loss_sum])
    assert gpu.loss_sum.tolist() == pytest.approx(cpu.loss_sum.tolist(), rel=tolerance)
    cpu.load_state_dict(map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, gpu.state_dict()))
    gpu.step(batches[3])
    cpu.step(same_batches[3])
    assert gpu.loss_sum.tolist() == pytest.approx(cpu.loss_sum.tolist(), rel=tolerance)
    torch.testing.assert_close(predicted(gpu), predicted(cpu), rtol=tolerance, atol=tolerance)
    options = {"streams": 3, "batch_size": 3, "vocabulary": corpus.vocabulary}
    with ExitStack() as stack:
        for trainer in (gpu, cpu):
            stack.enter_context(trainer.evaluation_weights())
        found, wanted = (score_tokens(t.model, corpus.split("valid"), **options) for t in (gpu, cpu))
    assert found.loss == pytest.approx(wanted.loss, rel=tolerance)


@torch.no_grad()
def predicted(trainer: Trainer) -> Tensor:
    """Probabilities of the likeliest words, and a sampled word of each row."""
    model = trainer.model.eval()
    words_TB = torch.arange(12, device=trainer.device).view(6, 2)
    predictions, _ = model.read(words_TB, model.initial_state(2))
    last = predictions.at(torch.tensor([5, 5], device=trainer.device), torch.tensor([0, 1], device=trainer.device))
    trainer.model.train()
    last.sample(torch.tensor([0.2, 0.7], device=trainer.device, dtype=torch.float64), top_p=0.9)
    return last.topk(3)[0].cpu().float()


@pytest.mark.filterwarnings("error:RNN module weights")
@pytest.mark.parametrize("variation", VARIATIONS)
def test_gpu_matches_cpu_without_waiting(small: Tiny, variation: str, cuda: Gpu | None) -> None:
    """In bfloat16, the factors of products over the vocabulary are aligned for tensor cores, if their widths are."""
    check(small, variation, tolerance=1e-4)
    check(small, f"{variation} {BF16}", tolerance=0.02)
    if cuda is not None and not variation.startswith(("output=dsoftmax output", "model=scrn")):
        assert not cuda.misaligned


@pytest.mark.slow
@pytest.mark.filterwarnings("error:RNN module weights")
@pytest.mark.parametrize("variation", ALL)
@pytest.mark.usefixtures("cuda")
def test_gpu_matches_cpu_in_every_combination(small: Tiny, variation: str) -> None:
    check(small, variation, tolerance=1e-3)


@pytest.mark.slow
def test_commands_on_second_gpu(command: Command, workspace: Path, cuda: Gpu | None) -> None:
    """Automatic clusters, training, resume, evaluation and generation."""
    if cuda is None and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    settings = [*TINY, "output=adaptive", "output.cutoffs=[10,20]", "trainer.max_steps=10", "trainer.log_every_steps=5"]
    for device in ("cpu", "cuda:1"):
        run = f"run_dir={device}"
        done = command("train.py", *settings, run, f"trainer.device={device}")
        assert f"device   {device} (" in done.stdout
        command("train.py", f"resume={device}", "trainer.max_steps=20")
        command("evaluate.py", f"checkpoint={device}", f"device={device}")
        command("lm/generate.py", f"checkpoint={device}", f"device={device}", "max_words=5")
    assert torch.cuda.current_device() == 1
    found, wanted = (
        [record["train/loss"] for record in read_metrics(workspace / device) if "train/loss" in record]
        for device in ("cuda:1", "cpu")
    )
    assert found == pytest.approx(wanted, rel=1e-4) and len(found) == 4
    command("train.py", *TINY, "output=adaptive", "run_dir=auto", "trainer.max_steps=2", "trainer.device=cuda:1")
    summary = json.loads((workspace / "auto/summary.json").read_text())
    assert summary["output"]["predicted"]["source"].startswith("measured on cuda:1")


@pytest.mark.parametrize(("cudnn", "dtype"), [(91200, torch.float32), (91300, torch.bfloat16)])
@pytest.mark.parametrize("core", CORES)
def test_bf16_works_with_older_libraries(small: Tiny, core: str, cudnn: int, dtype: torch.dtype) -> None:
    """torch 2.8 rejects matmuls that return float32 sums; cuDNN before 9.13 has no bfloat16 recurrent layers."""
    with emulated_cuda(cudnn=cudnn, fused_sums=False) as gpu:
        check(small, f"{core} {BF16}", tolerance=0.02)
        name = precision_name("bf16", torch.device("cuda"))
        assert ("TF32 in recurrent layers" in name) == (dtype == torch.float32)
    assert gpu.recurrent_dtypes <= {torch.float32, dtype}
    assert (dtype in gpu.recurrent_dtypes) == ("feedforward" not in core and "transformer" not in core)


def test_sums_in_arbitrary_order_are_documented(small: Tiny) -> None:
    """docs/gpu.md lists the layers whose sums use atomics; the others repeat a run bit for bit."""
    using = set()
    for variation in [*LAYERS, MAXENT[0]]:
        config = small(*variation.split())
        with emulated_cuda() as gpu:
            trainer, batches = make_trainer(config, open_corpus(config.data), device="cuda", num_batches=2)
            for batch in batches:
                trainer.step(batch)
        using |= {variation.split()[0]} if gpu.atomics else set()
    assert using == {"output=hsm_freq", "output=hsm_huffman", "model.maxent.order=3"}


def test_emulated_gpu_has_the_rules_of_a_real_one() -> None:
    with emulated_cuda(capability=(7, 5)) as gpu:
        numbers = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match="same device"):
            numbers + torch.ones(3)
        assert (numbers + torch.tensor(1.0)).device == torch.device("cuda:0")
        assert torch.empty_like(numbers).isnan().all() and torch.empty(2, device="cuda").isnan().all()
        for read in (lambda: numbers[0].item(), lambda: numbers[numbers > 0], lambda: numbers.cpu(), numbers.tolist):
            before = len(gpu.waits)
            read()
            assert len(gpu.waits) > before
            with pytest.raises(RuntimeError, match="synchronizes"), no_waiting_for_the_gpu():
                read()
        with pytest.raises(TypeError):
            numbers.numpy()
        lstm = torch.nn.LSTM(3, 4).to("cuda")
        lstm(numbers.view(1, 1, 3))
        state = 2 * [torch.zeros(1, 1, 4, device="cuda", dtype=torch.bfloat16)]
        with pytest.raises(RuntimeError, match="one dtype"):
            torch.lstm(numbers.view(1, 1, 3), state, lstm.all_weights[0], True, 1, 0.0, True, False, False)
        lstm.weight_hh_l0.data = lstm.weight_hh_l0.data.clone()
        with pytest.warns(UserWarning, match="single contiguous chunk"):
            lstm(numbers.view(1, 1, 3))
        assert precision_name("fp32", torch.device("cuda")) == "float32"
    with emulated_cuda():
        assert "tensor cores unused; trainer=gpu" in precision_name("fp32", pick_device("cuda", key="device"))
