#!/usr/bin/env bash
# What anyone with a GPU runs first; no network is needed. Six parts, in the order of what is worth most where
# the machine may be taken away:
#
#   bash scripts/gpu_session.sh PART [FOLDER]
#
#   1 smoke         seven small runs: the GPU against the CPU, and what part 2 measures against the plain run
#   2 best          an 8B model with fp32 weights, in bf16_pure, in float8 and with bf16 moments; a trace
#   3 correctness   each other feature against the plain run
#   4 features      traces, saves in the background, a kill, evaluation, out of memory, bad steps
#   5 throughput    other settings and models; the axes, where there are several GPUs
#   6 collectives   2, 4 and 8 ranks that share one GPU under NCCL, against one rank; no times are measured
#
# What is measured needs its own runs of part 1 or 3 to agree, and no others. FOLDER (default: gpu_session in the
# temporary folder) keeps the runs and results.json, to which each part adds its table; gpu_compare.py says what
# passes. A part that was cut off resumes where it stopped. Where only an output folder outlives the machine,
# OUT names it: after each case it gets gpu_session.tgz, all but large files. A later call, on a bare machine too,
# resumes from that file if TAKE names it.
#
# PYTHON names another interpreter, WHEELS a folder of wheels that it lacks, GPU_GIB the memory of the GPU by
# which cases are chosen (default: what it has). DRY_RUN=1 only prints the commands. Of part 6, CASES names the
# cases (default: all of tests/gpu/shared_cases.py and shared_life.py), BUDGET_S the seconds after which no case
# begins (default: 300), CASE_S the seconds of one case (default: 180), and DEVICE=cpu rehearses it with gloo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
part="${1:-}" folder="${2:-${TMPDIR:-/tmp}/gpu_session}" python="${PYTHON:-python3}"
if [[ ! "$part" =~ ^[1-6]$ ]]; then
    echo "gpu_session.sh: error: PART ($part) must be a number from 1 to 6" >&2
    exit 2
fi
runs="$folder/runs"
mkdir -p "$runs"
[[ -z "${DRY_RUN:-}" ]] || AT_ONCE=1 # so commands are printed in their order
[[ -z "${TAKE:-}" ]] || tar -xzf "$TAKE" --skip-old-files -C "$folder"
if [[ -n "${WHEELS:-}" ]]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$folder/site" "$WHEELS"/*.whl
    export PYTHONPATH="$folder/site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$folder/inductor}"

# Puts what a later call needs into the output folder: a file in one piece, whenever the machine is taken away.
pack() {
    [[ -n "${OUT:-}" ]] || return 0
    (
        flock 9 # concurrent runs may end at the same time
        cd "$folder"
        find . \( -name inductor -o -name site -o -name checkpoints -o -name data \) -prune -o \
            -type f -size -4M -print0 | tar -czf "$OUT/.gpu_session.tgz" --null -T -
        mv "$OUT/.gpu_session.tgz" "$OUT/gpu_session.tgz"
    ) 9>"$folder/.lock"
}

# step COMMAND...: runs it, or prints it in one piece: others run at the same time.
step() {
    if [[ -n "${DRY_RUN:-}" ]]; then printf '%s\n' "$(printf '%q ' "$@")"; else "$@"; fi
}

# run NAME STATUS COMMAND...: runs it unless it has been run; notes whether it ended with STATUS, and what files
# it left. A function of several commands calls each by `step`.
run() {
    local name="$1" expected="$2" status=0
    shift 2
    if [[ -n "${DRY_RUN:-}" ]]; then
        if declare -F "$1" >/dev/null; then "$@"; else step "$@"; fi
        return
    fi
    [[ ! -f "$runs/$name.ok" ]] || return 0
    rm -rf "${runs:?}/$name"
    "$@" >"$runs/$name.log" 2>&1 || status=$?
    if [[ "$status" == "$expected" ]]; then
        (cd "$runs" && find "$name" -type f 2>/dev/null || true) >"$runs/.$name.ok"
        mv "$runs/.$name.ok" "$runs/$name.ok"
        echo "$name: done" >&2
    else
        echo "$name: ended with $status, not $expected; see $runs/$name.log" >&2
    fi
    pack
}

# train NAME FLAG...: a run of main_training.py in runs/NAME; small on the GPU unless the flags say more.
dummy=(--use_dummy_dataset=True --trackers=none --report_interval=1)
quiet=("${dummy[@]}" --checkpoint_interval=0 --save_last=False)
small=(--model_variant=194m --num_layers=4 --num_kv_heads=2 --seq_length=512)
train() { run "$1" 0 "$python" main_training.py "${@:2}" --output_dir="$runs/$1"; }

# later NAME FLAG...: the same with up to three others, which is fit for correctness only. At the learning rate of
# the preset the loss falls from 10.6 to 0.8 in these 20 steps, at gradient norms of up to 62, and rounding grows
# to 1 %; at a tenth it does not.
agree=(--num_steps=20 --learning_rate=3e-5)
await() { while (($(jobs -rp | wc -l) >= ${AT_ONCE:-4})); do wait -n || true; done; }
later() {
    await
    train "$1" "${small[@]}" "${quiet[@]}" "${agree[@]}" "${@:2}" &
}
on_cpu() { CUDA_VISIBLE_DEVICES="" later "$@" --mixed_precision=False; }
plain() { later "$1" --use_torch_compile=False "${@:2}"; }
sharded() {
    # by its address: the name of a machine need not resolve
    local torchrun=("$python" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc_per_node=1)
    await
    run "$1" 0 "${torchrun[@]}" main_training.py "${small[@]}" "${quiet[@]}" "${agree[@]}" --batch_size=4 \
        --sharding_strategy=fsdp "${@:2}" --output_dir="$runs/$1" &
}

b=--batch_size=4
smoke() {
    on_cpu fp32_cpu $b
    plain fp32 $b --mixed_precision=False --matmul_precision=highest
    plain bf16 $b
    later cheap $b --recompute=cheap
    later compiled_pure $b --recompute=cheap --precision=bf16_pure
    later compiled_float8 $b --recompute=cheap --precision=float8
    later compiled_moments $b --recompute=cheap --optimizer_state_dtype=bf16
    wait
}

correctness() {
    smoke
    on_cpu documents_cpu $b --document_mask=True
    on_cpu tied_cpu $b --tie_embeddings=True
    later compiled $b
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
    plain float8 $b --precision=float8
    plain float8_tensor $b --precision=float8 --float8_scaling=tensor
    sharded sharded_float8 --precision=float8
    sharded sharded_pure --precision=bf16_pure
    sharded sharded --use_torch_compile=False
    sharded sharded_compiled --recompute=blocks
    sharded sharded_offload --use_torch_compile=False --cpu_offload=True
    wait
}

# signalled FLAG...: a run that gets SIGTERM after its fifth step, and is started again.
signalled() {
    local child status=0 command=("$python" main_training.py "$@" --output_dir="$runs/resumed")
    if [[ -z "${DRY_RUN:-}" ]]; then
        "${command[@]}" &
        child=$!
        until grep -q '"step": 5,' "$runs/resumed/metrics.jsonl" 2>/dev/null || ! kill -0 $child; do
            sleep 0.1
        done
        kill -TERM $child || true
        wait $child || status=$?
        ((status == 75)) || return 1
    fi
    step "${command[@]}"
}

traced() {
    local name="$1"
    step "$python" main_training.py "${@:2}" --use_profiler=True --output_dir="$runs/$name"
}

evaluated() {
    local data="$folder/data" shape=(--model_variant=quickstart --seq_length=256 --num_steps=40)
    step "$python" -m fms_fsdp prepare --input=fms_fsdp,docs --output="$data" --tokenizer=byte \
        --split=98,2 --overwrite &&
        step "$python" main_training.py "${shape[@]}" --data_path="$data" --eval_interval=20 \
            --output_dir="$runs/evaluated" &&
        step "$python" -m fms_fsdp evaluate --path="$runs/evaluated" --json
}

features() {
    local large=(--model_variant=1.4b --seq_length=2048)
    run resumed 0 signalled "${small[@]}" "${dummy[@]}" "$b" --num_steps=400 --deterministic=True
    train whole "${small[@]}" "${dummy[@]}" "$b" --num_steps=400 --deterministic=True
    run traced 0 traced traced "${large[@]}" --batch_size=2 "${quiet[@]}" --num_steps=12 --memory_snapshot=True
    train saved "${large[@]}" --batch_size=2 "${dummy[@]}" --num_steps=60 --checkpoint_interval=20 \
        --keep_last_n=1
    run copied 0 "$python" benchmarks/gpu_copy.py
    run evaluated 0 evaluated
    run out_of_memory 1 "$python" main_training.py "${large[@]}" "${quiet[@]}" --batch_size=256 --num_steps=4 \
        --use_torch_compile=False --output_dir="$runs/out_of_memory"
    run bad_steps 1 "$python" main_training.py "${small[@]}" "${quiet[@]}" "$b" --max_bad_steps=3 \
        --learning_rate=1e30 --warmup_steps=0 --num_steps=40 --output_dir="$runs/bad_steps"
}

# sweep NAME NEEDED FLAG...: bench_train.py over a model with 4096 tokens a row, unless the flags say more, if
# the small run NEEDED agrees with its reference. One case a sweep: a part that was cut off repeats only that.
sweep() {
    if [[ -z "${DRY_RUN:-}" ]]; then
        "$python" benchmarks/gpu_compare.py "$folder" needs "$2" || return 0
    fi
    run "$1" 0 "$python" benchmarks/bench_train.py --rounds=3 --output="$runs/$1.json" --trackers=none \
        --seq_length=4096 "${@:3}"
}

# The rows of each case are what the memory of the GPU takes.
memory() { "$python" -c 'import torch; print(torch.cuda.mem_get_info()[1] >> 30)'; }
is_large() { ((${GPU_GIB:=$(memory)} >= 120)); }
cheap=(--recompute=cheap) eight=(--model_variant=llama3_8b) three=(--model_variant=llama3.2_3b)

best() {
    local pure=("${eight[@]}" "${cheap[@]}" --precision=bf16_pure) best=("${three[@]}" "${cheap[@]}" --batch_size=3)
    if is_large; then
        best=("${eight[@]}" "${cheap[@]}" --batch_size=3)
        sweep best cheap "${best[@]}"
        sweep of_pure compiled_pure "${pure[@]}" --batch_size=6
        sweep of_float8 compiled_float8 "${best[@]}" --precision=float8
        sweep of_moments compiled_moments "${eight[@]}" "${cheap[@]}" --batch_size=5 --optimizer_state_dtype=bf16
    else
        sweep small_best cheap "${best[@]}"
        sweep small_of_pure compiled_pure "${pure[@]}" --batch_size=2
        sweep small_of_float8 compiled_float8 "${best[@]}" --precision=float8
        sweep small_of_moments compiled_moments "${best[@]}" --optimizer_state_dtype=bf16
    fi
    run traced_best 0 traced traced_best "${best[@]}" --seq_length=4096 "${quiet[@]}" --num_steps=12 \
        --profiler_shapes=False
}

throughput() {
    local best=("${three[@]}" "${cheap[@]}" --batch_size=3) blocks=("${three[@]}" --recompute=blocks)
    local rows=4 of="small_" unsharded=("${three[@]}" "${cheap[@]}" --batch_size=2)
    if is_large; then
        best=("${eight[@]}" "${cheap[@]}" --batch_size=3) blocks=("${eight[@]}" --recompute=blocks) rows=8 of=""
        sweep of_7b cheap --model_variant=7b "${cheap[@]}" --batch_size=3
    fi
    # of a small model: FSDP keeps gradients in memory of another stream, which activations cannot use
    sweep "${of}without_fsdp" cheap "${unsharded[@]}"
    sweep "${of}one_rank" sharded_compiled "${unsharded[@]}" --torchrun --sharding_strategy=fsdp
    sweep "${of}by_document" compiled_documents "${best[@]}" --document_mask=true
    sweep "${of}by_flash" flash "${best[@]}" --attn_impl=flash
    sweep "${of}long" cheap "${best[@]:0:2}" --batch_size=1 --seq_length=8192
    sweep "${of}kept_ops" compiled_ops "${best[@]:0:1}" --recompute=ops --batch_size=2
    sweep "${of}all_blocks" compiled_blocks "${blocks[@]}" --batch_size=$rows
    local axes=(benchmarks/bench_parallel.py --device=cuda --output="$runs/axes.json") gpus
    gpus="$("$python" -c 'import torch; print(torch.cuda.device_count())')"
    ((${gpus:-0} < 2)) || run axes 0 "$python" "${axes[@]}"
}

# Its cases are resumed one by one, so this is no `run`.
collectives() {
    local device="${DEVICE:-cuda}" line
    local command=("$python" -m tests.gpu.shared_gpu "$runs/shared_$device" --device="$device"
        --budget_s="${BUDGET_S:-300}" --timeout_s="${CASE_S:-180}" --cases="${CASES:-}")
    if [[ -n "${DRY_RUN:-}" ]]; then
        step "${command[@]}"
        return
    fi
    { "${command[@]}" || echo "part 6: ended with $?"; } | while IFS= read -r line; do
        echo "$line" >&2
        pack
    done
}

names=(smoke best correctness features throughput collectives)
"${names[part - 1]}"
[[ -z "${DRY_RUN:-}" ]] || exit 0
status=0
"$python" benchmarks/gpu_compare.py "$folder" "$part" || status=$?
pack
exit $status
