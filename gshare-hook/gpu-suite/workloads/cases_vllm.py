"""vLLM with a model of two layers and random weights that is made on the spot: nothing is downloaded.

Token values come from kernels, so only their number is a fact. `kv` is no case for comparison: it says how much memory vLLM
takes for its cache, which the memory rows hold against the limit.
"""

import json
import os
import pathlib
import sys
import tempfile

# The sampler of FlashInfer is compiled by nvcc at the first use, and the newer model runner reads counts computed by kernels.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import report
from report import case

LAYERS, HEADS, HEAD_SIZE, VOCABULARY = 2, 4, 64, 512
UTILISATION = 0.5
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HEADS * HEAD_SIZE, "head_dim": HEAD_SIZE,
    "intermediate_size": 512, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY, "max_position_embeddings": 512, "torch_dtype": "float16", "bos_token_id": 1, "eos_token_id": 2,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}


def generate(eager):
    """An engine and two requests; returns their answers and the bytes of the cache."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(MODEL))
        engine = LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=eager, max_model_len=256,
            gpu_memory_utilization=UTILISATION, max_num_seqs=4, seed=7, disable_log_stats=True,
        )
        sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0, detokenize=False)
        prompts = [{"prompt_token_ids": [3, 4, 5]}, {"prompt_token_ids": list(range(3, 40))}]
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        cache = engine.llm_engine.vllm_config.cache_config
        per_token = 2 * LAYERS * HEADS * HEAD_SIZE * 2
        return [len(answer.outputs[0].token_ids) for answer in answers], cache.num_gpu_blocks * cache.block_size * per_token


@case
def eager():
    tokens, _ = generate(eager=True)
    return {"tokens": tokens}


@case
def compiled():
    tokens, _ = generate(eager=False)
    return {"tokens": tokens}


def kv():
    _, cache = generate(eager=True)
    report.answer({"cache": cache, "utilisation": UTILISATION})


if __name__ == "__main__":
    if sys.argv[1:] == ["kv"]:
        kv()
    else:
        report.main()
