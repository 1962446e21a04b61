
import os
os.environ['TORCHINDUCTOR_CACHE_DIR'] = '/tmp/pytest-of-root/pytest-11/test_minifier_settings_1_0/cache'
os.environ['TRITON_CACHE_DIR'] = '/tmp/tmpojlx0hvy/triton'
os.environ['TORCH_COMPILE_DEBUG_DIR'] = '/tmp/pytest-of-root/pytest-11/test_minifier_settings_1_0/debug'
os.environ.pop('TORCHDYNAMO_REPRO_AFTER', None)
os.environ.pop('TORCHDYNAMO_REPRO_LEVEL', None)

from math import inf
import torch
from torch import tensor, device
import torch.fx as fx
import torch._dynamo
from torch._dynamo.testing import rand_strided
from torch._dynamo.debug_utils import run_fwd_maybe_bwd

import torch._dynamo.config
import torch._inductor.config
import torch._functorch.config
import torch.fx.experimental._config


torch._functorch.config.fake_tensor_allow_unsafe_data_ptr_access = True






from torch.nn import *
class Repro(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()



    def forward(self, L_x_ : torch.Tensor):
        l_x_ = L_x_
        relu = torch.relu(l_x_);  l_x_ = None
        mul = relu * 2;  relu = None
        return (mul,)


mod = Repro()

def load_args(reader):
    buf0 = reader.storage('cf5b2e5cabbcf5ad8c585821dbe4770fdd7b112a', 8)
    reader.tensor(buf0, (2,), is_leaf=True)  # L_x_
load_args._version = 0

if __name__ == '__main__':
    from torch._dynamo.repro.after_dynamo import run_repro
    run_repro(mod, load_args, accuracy=False, command='run',
        save_dir='/work/wt/shell/checkpoints', autocast=False, backend='fusion_pass')
