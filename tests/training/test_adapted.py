"""LoRA and tangent-space fine-tuning: what is trained in the encoder's place."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import make_recipe, merge
from mergeflow.modalities.vision.models import ImageEncoder, load_clip
from mergeflow.training import (
    FineTuneSettings,
    LinearisedEncoder,
    LoraEncoder,
    LoraSettings,
    TrainingSet,
    fine_tune,
)
from tests.training.test_fine_tune import Killed, kill_at

BLOCK = "visual.transformer.resblocks.0"


@pytest.fixture(scope="module")
def pocket() -> ImageEncoder:
    return ImageEncoder(load_clip("pocket-clip", "pocket8"))


@pytest.fixture
def encoder(pocket: ImageEncoder) -> ImageEncoder:
    return copy.deepcopy(pocket)


def task(images: int = 8) -> TrainingSet:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 32, 32, 3), generator=generator, dtype=torch.uint8)
    head = torch.nn.functional.normalize(torch.randn(128, 3, generator=generator), dim=0)
    return TrainingSet("toy", pixels, torch.arange(images) % 3, lambda features: 20 * features @ head)


def train(tuned, folder: Path, steps: int = 6, seed: int = 0, **extra):
    settings = FineTuneSettings(steps=steps, batch_size=4, learning_rate=5e-3, warmup=0.0, save_every=2)
    return fine_tune(tuned, [task()], settings, seed, folder / "saved.pt", lambda: 0.5, **extra)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class TestLora:
    def test_at_the_start_it_is_the_base(self, encoder: ImageEncoder) -> None:
        images = task().images
        expected, state = encoder(images), {name: v.clone() for name, v in encoder.encoder_state().items()}
        tuned = LoraEncoder(encoder, LoraSettings())
        torch.testing.assert_close(tuned(images), expected, rtol=0, atol=1e-6)
        assert same(tuned.encoder_state(), state)
        assert all(not up.any() for up in tuned.up)
        trained = [name for name, p in tuned.named_parameters() if p.requires_grad]
        assert {name.split(".")[0] for name in trained} == {"down", "up"}

    def test_the_expert_is_base_plus_alpha_over_rank_times_the_product(
        self, encoder: ImageEncoder, tmp_path: Path
    ) -> None:
        base = {name: value.clone() for name, value in encoder.encoder_state().items()}
        tuned = LoraEncoder(encoder, LoraSettings(rank=3, alpha=5))
        found = train(tuned, tmp_path)
        assert found.trajectory.rows[-1].loss < found.trajectory.rows[0].loss
        assert same(encoder.encoder_state(), base)  # W is frozen
        state = tuned.encoder_state()
        for weight, down, up in zip(tuned.adapted, tuned.down, tuned.up, strict=True):
            torch.testing.assert_close(state[weight] - base[weight], 5 / 3 * up @ down, rtol=1e-4, atol=1e-6)
            assert torch.linalg.matrix_rank(state[weight] - base[weight], rtol=1e-3) <= 3
        assert all(torch.equal(state[name], base[name]) for name in base if name not in tuned.adapted)
        images = task().images
        features = tuned(images)
        encoder.load_encoder_state(state)
        torch.testing.assert_close(encoder(images), features, rtol=0, atol=1e-6)

    def test_a_recipe_takes_the_adapter_for_the_expert(self, encoder: ImageEncoder, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "base.safetensors", encoder.encoder_state())
        tuned = LoraEncoder(encoder, LoraSettings(rank=2, alpha=3))
        train(tuned, tmp_path, steps=2)
        tuned.save(tmp_path / "adapter")
        write_checkpoint(tmp_path / "expert.safetensors", tuned.encoder_state())
        for kind, expert in (("adapter", "adapter"), ("expert", "expert.safetensors")):
            values = {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": str(tmp_path / "base.safetensors")}
            out = str(tmp_path / f"from_{kind}.safetensors")
            merge(make_recipe({**values, "experts": {"toy": str(tmp_path / expert)}, "out": out}))
        assert same(load_file(tmp_path / "from_adapter.safetensors"), tuned.encoder_state())
        half = load_file(tmp_path / "from_expert.safetensors")
        for name, value in tuned.encoder_state().items():
            torch.testing.assert_close(half[name], value, rtol=1e-6, atol=1e-7)

    def test_attention_in_the_adapter_goes_by_the_bases_names(self, encoder: ImageEncoder, tmp_path: Path) -> None:
        LoraEncoder(encoder, LoraSettings(targets=["attn"])).save(tmp_path)
        stored = set(load_file(tmp_path / "adapter_model.safetensors"))
        assert f"base_model.model.{BLOCK}.attn.lora_A.weight" in stored
        assert f"base_model.model.{BLOCK}.attn.base_layer.out_proj.lora_B.weight" in stored
        with open_checkpoint(tmp_path) as adapter:
            assert adapter.is_task_vector
            assert {name for name in adapter if name.startswith(BLOCK)} == {
                f"{BLOCK}.attn.in_proj_weight",
                f"{BLOCK}.attn.out_proj.weight",
            }

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_peft_loads_the_folder_and_computes_the_same(self, encoder: ImageEncoder, tmp_path: Path) -> None:
        """But for attention's output projection, which PEFT 0.21 moves twice as far (huggingface/peft#3774)."""
        from peft import PeftModel

        tuned = LoraEncoder(encoder, LoraSettings(rank=2, alpha=6))
        train(tuned, tmp_path, steps=2)
        tuned.save(tmp_path / "adapter")
        expected = tuned.encoder_state()
        model = PeftModel.from_pretrained(copy.deepcopy(encoder), str(tmp_path / "adapter")).merge_and_unload()
        for name, value in model.encoder_state().items():
            if not name.endswith("out_proj.weight"):
                torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)

    def test_deterministic_by_seed_whatever_torch_drew_before(self, encoder: ImageEncoder, tmp_path: Path) -> None:
        torch.rand(11)
        first = LoraEncoder(encoder, LoraSettings(), seed=3)
        torch.rand(5)
        again, other = LoraEncoder(encoder, LoraSettings(), seed=3), LoraEncoder(encoder, LoraSettings(), seed=4)
        assert all(torch.equal(a, b) for a, b in zip(first.down, again.down, strict=True))
        assert not torch.equal(first.down[0], other.down[0])
        for name, one in (("a", first), ("b", again)):
            one.save(tmp_path / name)
        assert all((tmp_path / "b" / p.name).read_bytes() == p.read_bytes() for p in (tmp_path / "a").iterdir())
        assert json.loads((tmp_path / "a/adapter_config.json").read_text())["peft_type"] == "LORA"

    def test_resumed_gives_the_same_bits(self, encoder: ImageEncoder, tmp_path: Path) -> None:
        whole, killed, resumed = (LoraEncoder(copy.deepcopy(encoder), LoraSettings(rank=2)) for _ in range(3))
        (tmp_path / "whole").mkdir()
        train(whole, tmp_path / "whole", steps=5)
        with pytest.raises(Killed):
            train(killed, tmp_path, steps=5, report=kill_at(3))
        train(resumed, tmp_path, steps=5)
        assert same(whole.encoder_state(), resumed.encoder_state())

    @pytest.mark.parametrize("name", ["atn", "out_proj", "conv1"])
    def test_unknown_targets_are_named(self, encoder: ImageEncoder, name: str) -> None:
        with pytest.raises(MergeflowError, match=rf"finetune.lora.targets '{name}': .*Known: attn, c_fc, c_proj"):
            LoraEncoder(encoder, LoraSettings(targets=["c_fc", name]))


class TestLinearised:
    def test_at_the_start_value_and_gradient_are_the_encoders(self, encoder: ImageEncoder) -> None:
        one, plain = task(4), copy.deepcopy(encoder)
        for model in (plain, tuned := LinearisedEncoder(encoder)):
            torch.nn.functional.cross_entropy(one.logits(model(one.images)), one.labels).backward()
        torch.testing.assert_close(tuned(one.images), plain(one.images), rtol=0, atol=1e-5)
        expected = dict(plain.visual.named_parameters())
        for name, weight in zip(tuned.names, tuned.weights, strict=True):
            torch.testing.assert_close(weight.grad, expected[name].grad, rtol=1e-3, atol=1e-5)

    def test_it_is_the_first_order_taylor_expansion(self, encoder: ImageEncoder) -> None:
        """The encoder's distance from its expansion falls with the square of the step."""
        encoder = encoder.double()
        tuned, pixels = LinearisedEncoder(encoder), torch.randn(2, 3, 32, 32, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        step = [torch.randn(w.shape, generator=generator, dtype=torch.float64) * w.std() for w in tuned.weights]
        plain, errors = copy.deepcopy(encoder), []
        for length in (1e-3, 1e-4):
            with torch.no_grad():
                for own, moved, origin, s in zip(
                    tuned.weights, plain.visual.parameters(), encoder.visual.parameters(), step, strict=True
                ):
                    own.copy_(origin + length * s)
                    moved.copy_(own)
                errors.append(float((plain.visual(pixels) - tuned.tower(pixels)).norm()))
        assert errors[0] / errors[1] == pytest.approx(100, rel=0.05)

    def test_task_arithmetic_is_linear(self, encoder: ImageEncoder) -> None:
        """f_lin(θ0 + Σ α_t τ_t) − f_lin(θ0) = Σ α_t (f_lin(θ0 + τ_t) − f_lin(θ0)): no task touches another's change."""
        encoder = encoder.double()
        tuned, pixels = LinearisedEncoder(encoder), torch.randn(2, 3, 32, 32, dtype=torch.float64)
        start = [w.detach().clone() for w in tuned.weights]
        generator = torch.Generator().manual_seed(0)
        taus = [[0.02 * torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in start] for _ in "ab"]

        @torch.no_grad()
        def tower(scales: tuple[float, float]) -> Tensor:
            for weight, origin, a, b in zip(tuned.weights, start, *taus, strict=True):
                weight.copy_(origin + scales[0] * a + scales[1] * b)
            return tuned.tower(pixels)

        origin = tower((0, 0))
        both = tower((0.7, -0.4)) - origin
        alone = 0.7 * (tower((1, 0)) - origin) - 0.4 * (tower((0, 1)) - origin)
        assert both.norm() > 0.01
        torch.testing.assert_close(both, alone, rtol=1e-9, atol=1e-9)

    def test_it_learns_from_a_frozen_base_and_resumes_to_the_same_bits(
        self, encoder: ImageEncoder, tmp_path: Path
    ) -> None:
        base = {name: value.clone() for name, value in encoder.encoder_state().items()}
        whole, killed, resumed = (LinearisedEncoder(copy.deepcopy(encoder)) for _ in range(3))
        (tmp_path / "whole").mkdir()
        train(whole, tmp_path / "whole", steps=4)
        with pytest.raises(Killed):
            train(killed, tmp_path, steps=4, report=kill_at(3))
        rows = train(resumed, tmp_path, steps=4).trajectory.rows
        assert same(whole.encoder_state(), resumed.encoder_state())
        assert same(whole.encoder.encoder_state(), base)
        assert rows[-1].loss < rows[0].loss
        assert not same(whole.encoder_state(), base)
