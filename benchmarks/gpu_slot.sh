#!/usr/bin/env bash
# What anyone with a GPU runs first. Four parts, each under 9 minutes on one H200; no network is needed.
#
#   bash benchmarks/gpu_slot.sh PART [FOLDER]
#
#   1 correctness   the GPU against the CPU, and each feature against the plain run
#   2 features      traces, saves in the background, a kill, evaluation, out of memory, bad steps
#   3 throughput    an 8B model in several settings; needs a part 1 without a failure
#   4 trace         the best setting traced, at 8192 tokens, and under other flags; needs part 1 too
#
# FOLDER (default: gpu_slot in the temporary folder) keeps the runs and results.json, to which each part adds
# its table. A part that was cut off goes on where it stopped. gpu_compare.py says what passes. PYTHON names
# another interpreter, WHEELS a folder of wheels that it lacks, BEST the flags of part 3's best case for part
# 4 (default: "--recompute=cheap --batch_size=3"). DRY_RUN=1 only prints the commands.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
part="${1:-}" folder="${2:-${TMPDIR:-/tmp}/gpu_slot}" python="${PYTHON:-python3}"
if [[ ! "$part" =~ ^[1-4]$ ]]; then
    echo "gpu_slot.sh: error: PART ($part) must be 1, 2, 3 or 4" >&2
    exit 2
fi
runs="$folder/runs"
mkdir -p "$runs"
if [[ -n "${WHEELS:-}" ]]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$folder/site" "$WHEELS"/*.whl
    export PYTHONPATH="$folder/site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$folder/inductor}"

# run NAME STATUS COMMAND...: runs it unless it has been run; notes whether it ended with STATUS.
run() {
    local name="$1" expected="$2" status=0
    shift 2
    if [[ -n "${DRY_RUN:-}" ]]; then
        printf '%s\n' "$(printf '%q ' "$@")" # a line in one piece: others run beside
        return
    fi
    [[ ! -f "$runs/$name.ok" ]] || return 0
    rm -rf "${runs:?}/$name"
    "$@" >"$runs/$name.log" 2>&1 || status=$?
    if [[ "$status" == "$expected" ]]; then
        touch "$runs/$name.ok"
        echo "$name: done" >&2
    else
        echo "$name: ended with $status, not $expected; see $runs/$name.log" >&2
    fi
}

# train NAME FLAG...: a run of main_training.py in runs/NAME; small on the GPU unless the flags say more.
dummy=(--use_dummy_dataset=True --trackers=none --report_interval=1)
quiet=("${dummy[@]}" --checkpoint_interval=0 --save_last=False)
small=(--model_variant=194m --num_layers=4 --num_kv_heads=2 --seq_length=512)
train() { run "$1" 0 "$python" main_training.py "${@:2}" --output_dir="$runs/$1"; }

# later NAME FLAG...: the same beside up to three others, which is fit for correctness only.
later() {
    while (($(jobs -rp | wc -l) >= ${AT_ONCE:-4})); do wait -n || true; done
    train "$1" "${small[@]}" "${quiet[@]}" --num_steps=20 "${@:2}" &
}
on_cpu() { CUDA_VISIBLE_DEVICES="" later "$@" --mixed_precision=False; }
plain() { later "$1" --use_torch_compile=False "${@:2}"; }
sharded() {
    local torchrun=("$python" -m torch.distributed.run --standalone --nproc_per_node=1)
    while (($(jobs -rp | wc -l) >= ${AT_ONCE:-4})); do wait -n || true; done
    run "$1" 0 "${torchrun[@]}" main_training.py "${small[@]}" "${quiet[@]}" --num_steps=20 --batch_size=4 \
        --sharding_strategy=fsdp "${@:2}" --output_dir="$runs/$1" &
}

correctness() {
    local b=--batch_size=4 fp32=(--mixed_precision=False --matmul_precision=highest)
    on_cpu fp32_cpu $b
    on_cpu documents_cpu $b --document_mask=True
    on_cpu tied_cpu $b --tie_embeddings=True
    plain fp32 $b "${fp32[@]}"
    plain bf16 $b
    later compiled $b
    later cheap $b --recompute=cheap
    plain ops $b --recompute=ops
    later compiled_ops $b --recompute=ops
    plain blocks $b --recompute=blocks
    later compiled_blocks $b --recompute=blocks --selective_checkpointing=1/2
    plain cudnn $b --attn_impl=cudnn
    plain flash $b --attn_impl=flash
    plain math $b --attn_impl=math
    plain counted $b --log_param_norm=True --log_num_zeros=True
    plain accumulated --batch_size=1 --grad_accum_steps=4
    plain documents $b --document_mask=True
    later compiled_documents $b --document_mask=True --recompute=cheap
    later documents_in_blocks $b --document_mask=True --recompute=blocks
    plain tied $b --tie_embeddings=True
    plain repeated $b --deterministic=True
    plain repeated_again $b --deterministic=True
    plain fp16 $b --precision=fp16
    plain pure $b --precision=bf16_pure
    later compiled_pure $b --precision=bf16_pure
    plain float8 $b --precision=float8
    plain float8_tensor $b --precision=float8 --float8_scaling=tensor
    later compiled_float8 $b --precision=float8
    sharded sharded_float8 --precision=float8
    sharded sharded_pure --precision=bf16_pure
    sharded sharded --use_torch_compile=False
    sharded sharded_compiled --recompute=blocks
    sharded sharded_offload --use_torch_compile=False --cpu_offload=True
    wait
}

# signalled NAME FLAG...: the same, and SIGTERM after its fifth step.
signalled() {
    local child
    rm -rf "${runs:?}/$1"
    "$python" main_training.py "${@:2}" --output_dir="$runs/$1" &
    child=$!
    until grep -q '"step": 5,' "$runs/$1/metrics.jsonl" 2>/dev/null || ! kill -0 $child; do sleep 0.1; done
    kill -TERM $child
    wait $child
}

features() {
    local large=(--model_variant=1.4b --seq_length=2048 --batch_size=2) b=--batch_size=4
    local stopped=("${small[@]}" "${dummy[@]}" "$b" --num_steps=400 --deterministic=True)
    local data="$folder/data" run_on_text=(--model_variant=quickstart --seq_length=256 --num_steps=40)
    train traced "${large[@]}" "${quiet[@]}" --num_steps=12 --use_profiler=True --memory_snapshot=True
    run traced_table 0 "$python" -m fms_fsdp trace --path="$runs/traced"
    train saved "${large[@]}" "${dummy[@]}" --num_steps=60 --checkpoint_interval=20 --keep_last_n=1
    run copied 0 "$python" benchmarks/gpu_copy.py
    train whole "${stopped[@]}"
    run signalled 75 signalled resumed "${stopped[@]}"
    run resumed_rest 0 "$python" main_training.py "${stopped[@]}" --output_dir="$runs/resumed"
    run prepared 0 "$python" -m fms_fsdp prepare --input=fms_fsdp,docs --output="$data" \
        --tokenizer=bytes --split=98,2
    train evaluated "${run_on_text[@]}" --data_path="$data" --eval_interval=20
    run evaluation 0 "$python" -m fms_fsdp evaluate --path="$runs/evaluated" --json
    run out_of_memory 1 "$python" main_training.py --model_variant=llama3_8b --seq_length=4096 "${quiet[@]}" \
        --batch_size=32 --num_steps=4 --use_torch_compile=False --output_dir="$runs/out_of_memory"
    run bad_steps 1 "$python" main_training.py "${small[@]}" "${quiet[@]}" "$b" --max_bad_steps=3 \
        --learning_rate=1e30 --warmup_steps=0 --num_steps=40 --output_dir="$runs/bad_steps"
}

# sweep NAME FLAG...: bench_train.py over an 8B model with 4096 tokens a row, unless the flags say more.
sweep() {
    run "$1" 0 "$python" benchmarks/bench_train.py --rounds=3 --output="$runs/$1.json" --trackers=none \
        --model_variant=llama3_8b --seq_length=4096 "${@:2}"
}

# What has a target comes first; a sweep of one case, so that a part that was cut off repeats only that.
throughput() {
    local rows
    for rows in 3 2; do sweep "best.$rows" --recompute=cheap --batch_size=$rows; done
    sweep best.whole --batch_size=2
    for rows in 6 4; do sweep "pure.$rows" --recompute=cheap --batch_size=$rows --precision=bf16_pure; done
    sweep of_7b --model_variant=7b --recompute=cheap --batch_size=3
    sweep float8 --recompute=cheap --batch_size=3 --precision=float8
    sweep ops --recompute=ops --batch_size=3
    sweep all_blocks --recompute=blocks --batch_size=8
}

trace() {
    local best
    read -ra best <<<"${BEST:---recompute=cheap --batch_size=3}"
    train traced_best --model_variant=llama3_8b --seq_length=4096 "${quiet[@]}" "${best[@]}" --num_steps=12 \
        --use_profiler=True --profiler_shapes=False
    run traced_best_table 0 "$python" -m fms_fsdp trace --path="$runs/traced_best"
    sweep long --recompute=cheap --batch_size=1 --seq_length=8192
    sweep alone "${best[@]}"
    sweep by_document "${best[@]}" --document_mask=true
    sweep one_rank "${best[@]}" --torchrun --sharding_strategy=fsdp
    sweep by_flash "${best[@]}" --attn_impl=flash
}

names=(correctness features throughput trace)
if ((part >= 3)) && [[ -z "${DRY_RUN:-}" ]]; then
    "$python" benchmarks/gpu_compare.py "$folder" 1 >/dev/null || {
        echo "gpu_slot.sh: error: part 1 must pass first: no throughput of a wrong run" >&2
        exit 2
    }
fi
"${names[part - 1]}"
[[ -n "${DRY_RUN:-}" ]] || exec "$python" benchmarks/gpu_compare.py "$folder" "$part"
