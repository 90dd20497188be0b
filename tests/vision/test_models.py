"""Loading CLIP models, the image encoder, the tokenizer, and what goes wrong."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import open_clip
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.models import ASSETS, ImageEncoder, load_clip
from mergeflow.modalities.vision.tokenizer import END, FIRST_BUCKET, WordTokenizer
from mergeflow.modality import Network


@pytest.fixture(scope="module")
def clip():
    return load_clip("pocket-clip", "pocket8")


@pytest.fixture(scope="module")
def images():
    return torch.randint(0, 256, (6, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_encoder_is_open_clips_image_tower_on_normalised_pixels(clip, images):
    pixels = images.permute(0, 3, 1, 2) / 255
    pixels = (pixels - 110 / 255) / (65 / 255)
    with torch.no_grad():
        expected = clip.model.encode_image(pixels, normalize=True)
        torch.testing.assert_close(ImageEncoder(clip)(images), expected, rtol=1e-4, atol=1e-5)


def test_the_shortcut_through_the_last_block_has_the_whole_towers_gradients(images):
    encoder = ImageEncoder(load_clip("pocket-clip", seed=4)).train()
    weights = torch.randn(128, generator=torch.Generator().manual_seed(2))
    gradients = []
    for whole in (False, True):
        encoder.zero_grad()
        hook = encoder.visual.transformer.register_forward_hook(lambda *_: None) if whole else None
        (encoder(images) @ weights).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in encoder.named_parameters()})
        if hook:
            hook.remove()
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], rtol=1e-3, atol=2e-5, msg=name)


def test_an_observed_last_block_sees_every_token(images):
    encoder = ImageEncoder(load_clip("pocket-clip"))
    seen = []
    encoder.visual.transformer.resblocks[-1].mlp.c_fc.register_forward_hook(lambda _, x, __: seen.append(x[0].shape))
    with torch.no_grad():
        encoder(images)
    assert seen == [(6, 17, 128)]


@pytest.mark.slow
def test_a_real_architecture_encodes():
    """ViT-B-32 with random weights: the shortcut holds for it, and its state keeps open_clip's names."""
    clip = load_clip("ViT-B-32")
    picture = torch.randint(0, 256, (2, 224, 224, 3), dtype=torch.uint8)
    encoder = ImageEncoder(clip)
    with torch.no_grad():
        expected = clip.model.encode_image(encoder.normalised_pixels(picture), normalize=True)
        torch.testing.assert_close(encoder(picture), expected, rtol=1e-4, atol=1e-5)
    assert clip.mean == pytest.approx((0.48145466, 0.4578275, 0.40821073))
    assert clip.tokenizer(["a photo of a cat"]).shape == (1, 77)


def test_the_shipped_base_carries_its_recipe():
    from mergeflow.checkpoints import open_checkpoint

    with open_checkpoint(ASSETS / "pocket8-base.safetensors") as base:
        recipe = json.loads(base.metadata["recipe"])
        assert recipe["suite"] == "pocket8"
        assert all(info.dtype.torch == torch.float32 for info in base.infos.values())


def test_a_thread_computes_the_same_bits(clip, images):
    encoder = ImageEncoder(clip)
    with torch.inference_mode(), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(torch.inference_mode()(encoder), images).result(), encoder(images))


def test_state_names_are_open_clips_and_swapping_works_in_place(images):
    clip, other = load_clip("pocket-clip", seed=1), load_clip("pocket-clip", seed=2)
    encoder, target = ImageEncoder(clip), ImageEncoder(other)
    pointers = [parameter.data_ptr() for parameter in encoder.parameters()]
    Network(encoder).load(Network(target).state())
    assert [parameter.data_ptr() for parameter in encoder.parameters()] == pointers
    with torch.no_grad():
        assert torch.equal(encoder(images), target(images))
    names = set(clip.model.state_dict())
    assert Network(encoder).state().keys() == {name for name in names if name.startswith("visual.")}


def test_random_weights_follow_the_seed_and_leave_the_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, two, three = (load_clip("pocket-clip", seed=seed).model.state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], two[name]) for name in first)
    assert not torch.equal(first["visual.proj"], three["visual.proj"])


def test_models_made_in_threads_are_the_models_made_alone():
    def projection(seed):
        return load_clip("pocket-clip", seed=seed).model.visual.proj

    alone = [projection(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(projection, range(4)))
    assert all(torch.equal(first, two) for first, two in zip(alone, together, strict=True))


def test_loading_says_nothing(capfd):
    handlers = logging.getLogger().handlers[:]
    load_clip("pocket-clip")
    assert logging.getLogger().handlers == handlers
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_local_files_load(tmp_path, suffix, prefix):
    source = load_clip("pocket-clip", seed=7).model.state_dict()
    state = {prefix + name: value for name, value in source.items()}
    path = tmp_path / f"clip{suffix}"
    if suffix == ".pt":
        torch.save({"state_dict": state, "epoch": 3}, path)
    else:
        save_file(state, path)
    loaded = load_clip("pocket-clip", str(path)).model.state_dict()
    assert all(torch.equal(loaded[name], source[name]) for name in source)


def test_a_file_of_another_architecture_is_refused_with_all_differences(tmp_path):
    path = tmp_path / "small.safetensors"
    save_file(load_clip("pocket-clip").model.state_dict(), path)
    with pytest.raises(MergeflowError, match=r"does not fit the model") as caught:
        load_clip("ViT-B-32", str(path))
    message = str(caught.value)
    assert "visual.proj: shape (128, 128), expected (768, 512)" in message
    assert "visual.transformer.resblocks.11.mlp.c_fc.weight: missing" in message


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("pocket-clap",), "did you mean 'pocket-clip'"),
        (("pocket-clip", "pocket9"), "did you mean 'pocket8'"),
        (("ViT-B-32", "openia"), "did you mean 'openai'"),
        (("pocket-clip", "missing/base.safetensors"), "does not exist"),
        (("ViT-B-32", "openai"), "name the architecture 'ViT-B-32-quickgelu'"),  # a tag that needs more than the name
    ],
)
def test_names_are_checked(names, message):
    with pytest.raises(MergeflowError, match=message):
        load_clip(*names)


def test_a_folder_of_open_clips_loads_and_others_are_named_by_their_kind(tmp_path):
    folder = tmp_path / "clip"
    folder.mkdir()
    refused(folder, r"expected one that open_clip saved, with open_clip_config\.json")
    (folder / "config.json").write_text('{"model_type": "vit"}')
    refused(folder, r"clip is a folder of transformers; .* leave `architecture` out")
    source = load_clip("pocket-clip", seed=7).model.state_dict()
    config = {"model_cfg": open_clip.get_model_config("pocket-clip"), "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    save_file(source, folder / "open_clip_model.safetensors")
    loaded = load_clip("pocket-clip", str(folder)).model.state_dict()
    assert all(torch.equal(loaded[name], source[name]) for name in source)
    refused(folder, "not of model.architecture 'ViT-B-32': it is 'pocket-clip'", "ViT-B-32")
    (folder / "open_clip_config.json").write_text(json.dumps(config | {"preprocess_cfg": {"mean": [0.5] * 3}}))
    refused(folder, r"expect pixels with mean \[0.5")
    (folder / "open_clip_config.json").write_text("[]")
    refused(folder, "is not what open_clip writes")


def refused(place: Path, message: str, architecture: str = "pocket-clip") -> None:
    with pytest.raises(MergeflowError, match=message):
        load_clip(architecture, str(place))


def test_weights_of_other_names_or_of_another_vocabulary_are_refused(tmp_path):
    path = tmp_path / "vit.safetensors"
    save_file({"vit.embeddings.cls_token": torch.zeros(1)}, path)
    refused(path, r"names are like 'vit.embeddings.cls_token', open_clip's like '")
    save_file(load_clip("pocket-clip").model.state_dict(), path, {"vocabulary": "0" * 64})
    refused(path, "another vocabulary")


class _Malice:
    def __reduce__(self):
        return print, ("this must never run",)


def test_damaged_files_and_pickles_are_refused(tmp_path, capfd):
    state = load_clip("pocket-clip").model.state_dict()
    short, cut, evil, empty = (tmp_path / name for name in ("short.safetensors", "cut.pt", "evil.pt", "empty.pt"))
    save_file(state, short)
    torch.save(state, cut)
    for path in (short, cut):
        path.write_bytes(path.read_bytes()[:-1000])
        refused(path, path.name)
    torch.save({"state_dict": _Malice()}, evil)
    refused(evil, evil.name)
    assert "never run" not in capfd.readouterr().out
    torch.save({"epoch": 3}, empty)
    refused(empty, "no state dict")


def test_tokens_pad_with_zero_and_end_with_the_highest_id():
    ids = WordTokenizer()(["a photo of beach", "beach zebra", "a " * 20])
    assert ids.shape == (3, 8)
    assert ids[0, 4] == END
    assert (ids[0, 5:] == 0).all()
    assert ids[0, 3] == ids[1, 0] < FIRST_BUCKET <= ids[1, 1] < END
    assert ids[2, -1] == END


@given(st.lists(st.text(max_size=60), min_size=1, max_size=5))
def test_any_text_has_exactly_one_end(texts):
    ids = WordTokenizer()(texts)
    assert ((ids == END).sum(dim=1) == 1).all()
    assert (ids.argmax(dim=1) == (ids != 0).sum(dim=1) - 1).all()
    assert torch.equal(ids, torch.cat([WordTokenizer()(text) for text in texts]))
