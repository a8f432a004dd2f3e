"""What plans and kernels are kept under names all that they depend on beside the model."""

from tvm_fusion.config import load_policy, load_profile, profile_file, resolve_target
from tvm_fusion.cost.learned.learned import residual_file
from tvm_fusion.flow.plan_cache import surroundings

POLICY = load_policy({"probe": "off"})


def test_another_residual_is_another_key(tmp_path):
    text = profile_file("nvidia_h200").read_text()
    own = tmp_path / "own.toml"
    own.write_text(text.replace("value = 132", "value = 100", 1))
    hw, (target, _) = load_profile(own), resolve_target("nvidia_h200")
    assert hw.num_sms == 100
    residual, keys = residual_file(hw), [surroundings(target, hw, POLICY)]
    assert residual.parent == tmp_path
    for text in ("one", "two"):  # of equal sizes
        residual.write_text(text)
        keys.append(surroundings(target, hw, POLICY))
    assert surroundings(target, hw, POLICY) == keys[-1]
    residual.unlink()
    assert surroundings(target, hw, POLICY) == keys[0]
    assert len({repr(key) for key in keys}) == 3
