"""The pass inside an Inductor set-up that has a custom pass of its own already.

``CountMatmuls`` is that pass: it stands in Inductor's post-grad hook, as it did before fusion_pass came.
``fusion_pass.enabled()`` adds the pass behind it for what is compiled inside the ``with``; ``fusion_pass.install()``
would do so for the whole process. Inductor's cache stays on: both passes have a ``uuid``.

    python examples/inductor_custom_pass.py
"""

import torch
from plain_attention import example
from torch._inductor.custom_graph_pass import CustomGraphPass

import fusion_pass


class CountMatmuls(CustomGraphPass):
    """Somebody's pass: how many matrix products does Inductor get?"""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)
        self.seen.append(sum(node.target in products for node in graph.nodes))

    def uuid(self) -> str:
        return "count matmuls, version 1"


def main() -> tuple[fusion_pass.Report, CountMatmuls]:
    """Compile with both passes; print and return the report, and the other pass."""
    theirs = CountMatmuls()
    model, args = example()
    with torch.no_grad(), torch._inductor.config.patch(post_grad_custom_pre_pass=theirs):
        with fusion_pass.enabled():
            found = torch.compile(model)(*args)             # the first call compiles
        print(f"largest difference to eager: {(found.float() - model(*args).float()).abs().max():.1e}")
    report = fusion_pass.reports()[-1]
    print(report)
    print(f"the other pass saw {theirs.seen} matrix products, before the fusion")
    return report, theirs


if __name__ == "__main__":
    main()
