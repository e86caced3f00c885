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


def engine(eager, utilisation=UTILISATION):
    """An engine with this model."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(MODEL))
        return LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=eager, max_model_len=256,
            gpu_memory_utilization=utilisation, max_num_seqs=4, seed=7, disable_log_stats=True,
        )


def answered(engine):
    """The lengths of an engine's answers to two requests."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0, detokenize=False)
    prompts = [{"prompt_token_ids": [3, 4, 5]}, {"prompt_token_ids": list(range(3, 40))}]
    return [len(answer.outputs[0].token_ids) for answer in engine.generate(prompts, sampling, use_tqdm=False)]


@case
def eager():
    return {"tokens": answered(engine(eager=True))}


@case
def compiled():
    return {"tokens": answered(engine(eager=False))}


def kv():
    serving = engine(eager=True)
    answered(serving)
    cache = serving.llm_engine.vllm_config.cache_config
    size = cache.num_gpu_blocks * cache.block_size * 2 * LAYERS * HEADS * HEAD_SIZE * 2
    report.answer({"cache": size, "utilisation": UTILISATION})


if __name__ == "__main__":
    if sys.argv[1:] == ["kv"]:
        kv()
    else:
        report.main()
