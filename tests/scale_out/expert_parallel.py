"""One rank of transformers' own expert-parallel plan, started by torchrun: `expert_parallel.py FOLDER RESULT.json`.

The plan splits the experts and the indexer's heads (DTensors and hooks of transformers) and keeps the attention whole.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import DeepseekV4ForCausalLM
from transformers.distributed import DistributedConfig

import fusion_pass
from fusion_pass.models import random_deepseek_v4


def main(folder: str, result: str) -> None:
    dist.init_process_group("gloo")
    ids = torch.randint(0, 500, (1, 40), generator=torch.Generator().manual_seed(0))
    settings = {"dtype": torch.float32, "experts": "grouped_mm"}
    whole = random_deepseek_v4("tiny", layer_types=["compressed_sparse_attention"], **settings)
    wanted = whole(ids, use_cache=False).logits
    if dist.get_rank() == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    plan = DistributedConfig(enable_expert_parallel=True, tp_size=dist.get_world_size())
    try:
        model = DeepseekV4ForCausalLM.from_pretrained(
            folder, distributed_config=plan, experts_implementation="grouped_mm", dtype=torch.float32).eval()
    except ValueError as error:         # transformers 5.24 wants a tensor-parallel plan too, which this model has not
        Path(result).write_text(json.dumps({"refused": str(error)}))
        return
    compiled = torch.compile(model, backend="fusion_pass", options={"inner": "aot_eager", "strict": True})
    logits = compiled(ids, use_cache=False).logits
    split = {name: list(p.to_local().shape) for name, p in model.named_parameters() if hasattr(p, "to_local")}
    mine = {
        "difference": ((logits - wanted).norm() / wanted.norm()).item(),
        "fused": [chain.roles for report in fusion_pass.reports() for chain in report.fused],
        "split": split,
    }
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(ranks))
    dist.destroy_process_group()


if __name__ == "__main__":
    with torch.no_grad():
        main(*sys.argv[1:])
