"""What an image brings stays: NGC's torch is never replaced by ours."""

from __future__ import annotations

from tools.image_constraints import constraints


def test_installed_packages_keep_their_version_and_others_take_ours():
    pinned = "# ours\ntorch==2.13.0\nnumpy==2.4.6\ntypes-PyYAML==6.0\nmegatron-core==0.16.1\n"
    image = {"torch": "2.10.0a0+b4e4ee81d3.nv25.12", "Transformer_Engine": "2.10.0", "Types_pyyaml": "5.0"}
    lines = constraints(pinned, image)
    assert "torch==2.10.0a0+b4e4ee81d3.nv25.12" in lines and "Transformer_Engine==2.10.0" in lines
    assert "numpy==2.4.6" in lines and "megatron-core==0.16.1" in lines
    assert not any(line.startswith(("torch==2.13", "types-PyYAML")) for line in lines)
