MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
    --normalization RMSNorm --swiglu --attention-dropout 0.0 --hidden-dropout 0.0
    --init-method-std 0.0134 --untie-embeddings-and-output-weights --disable-bias-linear
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 128
    --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252
    --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --lr-decay-style cosine
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --bf16 --grad-reduce-in-bf16 --manual-gc
    --use-distributed-optimizer --overlap-grad-reduce
    --tensor-model-parallel-size 1 --context-parallel-size 2
    --data-path 0.7 /data/web_text_document 0.3 /data/code_text_document
    --tokenizer-type NullTokenizer --vocab-size 128256
    --recompute-granularity full --recompute-method block --recompute-num-layers 8
)
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]}
