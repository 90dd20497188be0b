"""LoRA and tangent-space fine-tuning: what is trained in the encoder's place."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import make_recipe, merge
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head
from mergeflow.modalities.vision.models import image_model, load_clip
from mergeflow.modality import Network
from mergeflow.training import FineTuneSettings, LinearisedModel, LoraModel, LoraSettings, fine_tune

BLOCK = "visual.transformer.resblocks.0"


@pytest.fixture(scope="module")
def pocket() -> Network:
    return image_model(load_clip("pocket-clip", "pocket8"))


@pytest.fixture
def encoder(pocket: Network) -> Network:
    return copy.deepcopy(pocket)


def task(images: int = 8) -> Classification:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 32, 32, 3), generator=generator, dtype=torch.uint8)
    head = torch.nn.functional.normalize(torch.randn(128, 3, generator=generator), dim=0)
    return Classification("toy", pixels, torch.arange(images) % 3, Head(head.T.contiguous(), 20.0, ["a", "b", "c"]))


def train(tuned, folder: Path, steps: int = 6):
    settings = FineTuneSettings(steps=steps, batch_size=4, learning_rate=5e-3, warmup=0.0, save_every=2)
    return fine_tune(tuned, [task()], settings, 0, folder / "saved.pt", lambda: 0.5)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class TestLora:
    def test_at_the_start_it_is_the_base(self, encoder: Network) -> None:
        images = task().inputs
        expected, state = encoder.module(images), {name: v.clone() for name, v in encoder.state().items()}
        tuned = LoraModel.of(encoder, LoraSettings())
        torch.testing.assert_close(tuned.module(images), expected, rtol=0, atol=1e-6)
        assert same(tuned.state(), state)
        assert all(not up.any() for up in tuned.module.up)
        trained = [name for name, p in tuned.module.named_parameters() if p.requires_grad]
        assert {name.split(".")[0] for name in trained} == {"down", "up"}

    def test_the_expert_is_base_plus_alpha_over_rank_times_the_product(self, encoder: Network, tmp_path: Path) -> None:
        base = {name: value.clone() for name, value in encoder.state().items()}
        tuned = LoraModel.of(encoder, LoraSettings(rank=3, alpha=5))
        trained = train(tuned, tmp_path)
        assert trained.trajectory.rows[-1].loss < trained.trajectory.rows[0].loss
        assert same(encoder.state(), base)  # W is frozen
        state = tuned.state()
        for weight, down, up in zip(tuned.module.adapted, tuned.module.down, tuned.module.up, strict=True):
            torch.testing.assert_close(state[weight] - base[weight], 5 / 3 * up @ down, rtol=1e-4, atol=1e-6)
            assert torch.linalg.matrix_rank(state[weight] - base[weight], rtol=1e-3) <= 3
        assert all(torch.equal(state[name], base[name]) for name in base if name not in tuned.module.adapted)
        images = task().inputs
        features = tuned.module(images)
        encoder.load(state)
        torch.testing.assert_close(encoder.module(images), features, rtol=0, atol=1e-6)

    def test_a_recipe_takes_the_adapter_for_the_expert(self, encoder: Network, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "base.safetensors", encoder.state())
        tuned = LoraModel.of(encoder, LoraSettings(rank=2, alpha=3))
        train(tuned, tmp_path, steps=2)
        tuned.module.save(tmp_path / "adapter")
        write_checkpoint(tmp_path / "expert.safetensors", tuned.state())
        for kind, expert in (("adapter", "adapter"), ("expert", "expert.safetensors")):
            values = {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": str(tmp_path / "base.safetensors")}
            out = str(tmp_path / f"from_{kind}.safetensors")
            merge(make_recipe({**values, "experts": {"toy": str(tmp_path / expert)}, "out": out}))
        assert same(load_file(tmp_path / "from_adapter.safetensors"), tuned.state())
        half = load_file(tmp_path / "from_expert.safetensors")
        for name, value in tuned.state().items():
            torch.testing.assert_close(half[name], value, rtol=1e-6, atol=1e-7)

    def test_attention_in_the_adapter_goes_by_the_bases_names(self, encoder: Network, tmp_path: Path) -> None:
        LoraModel.of(encoder, LoraSettings(targets=["attn"])).module.save(tmp_path)
        stored = set(load_file(tmp_path / "adapter_model.safetensors"))
        assert f"base_model.model.{BLOCK}.attn.lora_A.weight" in stored
        assert f"base_model.model.{BLOCK}.attn.base_layer.out_proj.lora_B.weight" in stored
        with open_checkpoint(tmp_path) as adapter:
            assert adapter.is_task_vector
            first = {name for name in adapter if name.startswith(BLOCK)}
        assert first == {f"{BLOCK}.attn.in_proj_weight", f"{BLOCK}.attn.out_proj.weight"}

    @pytest.mark.filterwarnings("ignore::UserWarning")
    def test_peft_loads_the_folder_and_computes_the_same(self, encoder: Network, tmp_path: Path) -> None:
        """But for attention's output projection, which PEFT 0.21 moves twice as far (huggingface/peft#3774)."""
        from peft import PeftModel

        tuned = LoraModel.of(encoder, LoraSettings(rank=2, alpha=6))
        train(tuned, tmp_path, steps=2)
        tuned.module.save(tmp_path / "adapter")
        expected = tuned.state()
        model = PeftModel.from_pretrained(copy.deepcopy(encoder.module), str(tmp_path / "adapter")).merge_and_unload()
        for name, value in Network(model).state().items():
            if not name.endswith("out_proj.weight"):
                torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)

    def test_deterministic_by_seed_whatever_torch_drew_before(self, encoder: Network, tmp_path: Path) -> None:
        torch.rand(11)
        first = LoraModel.of(encoder, LoraSettings(), seed=3)
        torch.rand(5)
        again, other = LoraModel.of(encoder, LoraSettings(), seed=3), LoraModel.of(encoder, LoraSettings(), seed=4)
        assert all(torch.equal(a, b) for a, b in zip(first.module.down, again.module.down, strict=True))
        assert not torch.equal(first.module.down[0], other.module.down[0])
        for name, tuned_model in (("a", first), ("b", again)):
            tuned_model.module.save(tmp_path / name)
        assert all((tmp_path / "b" / p.name).read_bytes() == p.read_bytes() for p in (tmp_path / "a").iterdir())
        assert json.loads((tmp_path / "a/adapter_config.json").read_text())["peft_type"] == "LORA"

    @pytest.mark.parametrize("name", ["atn", "out_proj", "conv1"])
    def test_unknown_targets_are_named(self, encoder: Network, name: str) -> None:
        with pytest.raises(MergeflowError, match=rf"finetune.lora.targets '{name}': .*Known: attn, c_fc, c_proj"):
            LoraModel.of(encoder, LoraSettings(targets=["c_fc", name]))

    def test_a_linear_layer_may_be_named_like_a_part_of_attention(self) -> None:
        layers = nn.ModuleDict({"out_proj": nn.Linear(3, 2)})  # so transformers names it in CLIP
        adapted = LoraModel.of(Network(layers), LoraSettings(targets=["out_proj"])).module.adapted
        assert adapted == {"out_proj.weight": "out_proj"}

    def test_a_model_without_linear_layers_is_refused(self) -> None:
        with pytest.raises(MergeflowError, match="adapts linear layers, and the model has none"):
            LoraModel.of(Network(nn.Conv2d(3, 4, 1)), LoraSettings())


class TestLinearised:
    def test_at_the_start_value_and_gradient_are_the_encoders(self, encoder: Network) -> None:
        examples, plain = task(4), copy.deepcopy(encoder)
        for model in (plain, tuned := LinearisedModel.of(encoder, "visual")):
            examples.loss(model, torch.arange(4)).backward()
        torch.testing.assert_close(tuned.module(examples.inputs), plain.module(examples.inputs), rtol=0, atol=1e-5)
        expected = dict(plain.module.visual.named_parameters())
        for name, weight in zip(tuned.part.names, tuned.part.weights, strict=True):
            torch.testing.assert_close(weight.grad, expected[name].grad, rtol=1e-3, atol=1e-5)

    def test_it_is_the_first_order_taylor_expansion(self, encoder: Network) -> None:
        """The encoder's distance from its expansion falls with the square of the step."""
        encoder.module.double()
        tuned, pixels = LinearisedModel.of(encoder, "visual"), torch.randn(2, 3, 32, 32, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        step = [torch.randn(w.shape, generator=generator, dtype=torch.float64) * w.std() for w in tuned.part.weights]
        plain, errors = copy.deepcopy(encoder), []
        towers = (network.module.visual.parameters() for network in (plain, encoder))
        weights = list(zip(tuned.part.weights, *towers, step, strict=True))
        for length in (1e-3, 1e-4):
            with torch.no_grad():
                for trained, moved, origin, s in weights:
                    trained.copy_(origin + length * s)
                    moved.copy_(trained)
                errors.append(float((plain.module.visual(pixels) - tuned.part(pixels)).norm()))
        assert errors[0] / errors[1] == pytest.approx(100, rel=0.05)

    def test_task_arithmetic_is_linear(self, encoder: Network) -> None:
        """f_lin(θ0 + Σ α_t τ_t) − f_lin(θ0) = Σ α_t (f_lin(θ0 + τ_t) − f_lin(θ0)): no task touches another's change."""
        encoder.module.double()
        tuned, pixels = LinearisedModel.of(encoder, "visual"), torch.randn(2, 3, 32, 32, dtype=torch.float64)
        start = [w.detach().clone() for w in tuned.part.weights]
        generator = torch.Generator().manual_seed(0)
        taus = [[0.02 * torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in start] for _ in "ab"]

        @torch.no_grad()
        def tower(scales: tuple[float, float]) -> Tensor:
            for weight, origin, a, b in zip(tuned.part.weights, start, *taus, strict=True):
                weight.copy_(origin + scales[0] * a + scales[1] * b)
            return tuned.part(pixels)

        origin = tower((0, 0))
        both = tower((0.7, -0.4)) - origin
        alone = 0.7 * (tower((1, 0)) - origin) - 0.4 * (tower((0, 1)) - origin)
        assert both.norm() > 0.01
        torch.testing.assert_close(both, alone, rtol=1e-9, atol=1e-9)

    @pytest.mark.slow
    def test_it_learns_from_a_frozen_base(self, encoder: Network, tmp_path: Path) -> None:
        base = {name: value.clone() for name, value in encoder.state().items()}
        tuned = LinearisedModel.of(encoder, "visual")
        rows = train(tuned, tmp_path, steps=4).trajectory.rows
        assert rows[-1].loss < rows[0].loss
        assert same(tuned.base.state(), base)
        assert not same(tuned.state(), base)
