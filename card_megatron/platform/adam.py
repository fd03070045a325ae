"""AdamW in the state layout of Apex and Transformer Engine, for machines that have neither."""

from __future__ import annotations

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """AdamW that keeps `step` in the parameter group, as Apex and Transformer Engine do.

    torch.optim.AdamW keeps it beside each parameter, and then megatron-core 0.16.1 cannot load a distributed
    optimizer's checkpoint. The shared layout also lets a CPU checkpoint continue on a GPU.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        adam_w_mode=True,
        bias_correction=True,
        **unused,
    ):
        self.update = adamw if adam_w_mode else adam
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            steps_done = group.get("step", 0)
            group["step"] = steps_done + 1
            for param in params:
                if not self.state[param]:
                    self.state[param] = dict(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
            beta1, beta2 = group["betas"]
            self.update(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                [torch.full((), float(steps_done), device=param.device) for param in params],
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )
