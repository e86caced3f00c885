"""Cases of Hugging Face's transformers with a small Llama of random weights that is made on the spot: nothing is downloaded.

No case ends early at a token: which tokens come is computed by kernels, and their number has to be the same everywhere.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import report
import torch
from cases_torch import DEVICE, facts, seeded
from report import case
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 512


def model(dtype):
    seeded()
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(DEVICE, dtype)


def generate(**more):
    """Two prompts of different lengths in one batch, 16 new tokens each."""
    prompts = torch.tensor([[0, 0, 0, 3, 4, 5], [6, 7, 8, 9, 10, 11]], device=DEVICE)
    attended = (prompts != 0).long()
    with torch.no_grad():
        return model(torch.float16).eval().generate(
            prompts, attention_mask=attended, max_new_tokens=16, do_sample=False, use_cache=True, **more
        )


@case
def generated():
    """Greedy decoding with a cache that grows."""
    return facts(generate())


@case
def static_cache():
    """Greedy decoding with a cache of a fixed size, uncompiled."""
    return facts(generate(cache_implementation="static", disable_compile=True))


@case
def trained():
    """Three steps of training in mixed precision with checkpointed activations; memory at its peak as PyTorch counts it."""
    network = model(torch.float32).train()
    network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(7)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        tokens = torch.randint(3, VOCABULARY, (4, 64), generator=generator).to(DEVICE)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16):
            network(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return facts(*network.parameters(), peak=torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    report.main()
