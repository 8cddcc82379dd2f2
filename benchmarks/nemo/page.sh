#!/bin/bash
# Steps 3 to 7 of docs/from_hf_to_512k.md by its own commands, with a small random Qwen2.5 on one GPU: page.sh OUT WORK
# Nothing is stood in for. A line with the seconds and the exit status of each step goes to OUT/page.txt; a step is ended after
# STEP_SECONDS (600). Fails if a step did.
set -u
out=$1 work=$2 failed=0
mkdir -p "$out" "$work"
torchrun=$(command -v torchrun || echo "python3 -m torch.distributed.run")

step() {
    local name=$1 begin=$SECONDS
    shift
    timeout --foreground -k 5 "${STEP_SECONDS:-600}" "$@" > "$out/page-$name.log" 2>&1
    local status=$?
    [ $status = 0 ] || failed=1
    echo "$name: exit $status, $((SECONDS - begin)) s" | tee -a "$out/page.txt"
    return $status
}

step model python3 -c "
from pathlib import Path
from benchmarks.nemo import small
small.make_model('qwen', Path('$work/hf'), small.Sizes())
small.make_data(Path('$work/text_document'), small.Sizes())" || exit 1
step extend python3 examples/nemo/convert.py extend "$work/hf" "$work/hf_long" --seq-length 131072 || exit 1
step import python3 examples/nemo/convert.py import "$work/hf_long" "$work/imported" || exit 1
# A run that was ended after its save can still be exported; without a checkpoint, export says so.
step train $torchrun --nproc-per-node 1 --master-port "${MASTER_PORT:-29500}" \
    examples/nemo/run_recipe.py qwen25_3b_pretrain_8gpu_128k_config --metrics "$out/page-metrics.jsonl" \
    model.num_layers=4 model.hidden_size=1024 model.ffn_hidden_size=2816 model.num_attention_heads=8 model.kv_channels=128 \
    model.num_query_groups=2 model.vocab_size=32768 model.seq_length=8192 model.context_parallel_size=1 \
    train.train_iters=10 train.global_batch_size=2 validation.eval_iters=0 scheduler.lr_warmup_iters=1 \
    model.cross_entropy_loss_fusion=false checkpoint.save="$work/checkpoints" checkpoint.load="$work/checkpoints" \
    checkpoint.save_interval=10 logger.tensorboard_dir="$work/tb" \
    checkpoint.pretrained_checkpoint="$work/imported" dataset.data_path="$work/text_document" "dataset.split='90,5,5'" \
    tokenizer.tokenizer_type=HuggingFaceTokenizer tokenizer.tokenizer_model="$work/hf_long" tokenizer.vocab_size=null
step export python3 examples/nemo/convert.py export "$work/hf_long" "$work/checkpoints" "$work/trained" || exit 1
step generate python3 -c "
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained('$work/trained', dtype=torch.bfloat16).cuda()
tokens = AutoTokenizer.from_pretrained('$work/trained')('w5 w6 w7', return_tensors='pt').to('cuda')
print(model.config.max_position_embeddings, model.config.rope_parameters, model.generate(**tokens, max_new_tokens=8)[0].tolist())"
cp "$work/trained/config.json" "$out/page-config.json"
exit $failed
