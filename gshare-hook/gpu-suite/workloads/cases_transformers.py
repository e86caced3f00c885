"""Cases of Hugging Face's transformers with a small Llama of random weights that is made on the spot: nothing is downloaded.

Tokens are decoded one by one, as `generate` does, but a fixed number: `generate` goes on until a kernel has computed that all is
said, which no kernel of a simulated device does.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import report
import torch
from cases_torch import DEVICE, facts, seeded
from report import case
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

VOCABULARY, TOKENS = 512, 16


def model(dtype):
    seeded()
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(DEVICE, dtype)


def decode(network, cache):
    """The tokens that follow on two prompts, taken greedily, and the last logits."""
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]], device=DEVICE)
    answered = [tokens]
    with torch.no_grad():
        for _ in range(TOKENS):
            out = network(input_ids=tokens, past_key_values=cache, use_cache=True)
            tokens = out.logits[:, -1:].argmax(-1)
            answered.append(tokens)
    return facts(torch.cat(answered, dim=1), out.logits)


@case
def growing_cache():
    """Greedy decoding with a cache that grows."""
    network = model(torch.float16).eval()
    return decode(network, DynamicCache(config=network.config))


@case
def static_cache():
    """Greedy decoding with a cache of a fixed size."""
    network = model(torch.float16).eval()
    return decode(network, StaticCache(config=network.config, max_cache_len=64))


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
