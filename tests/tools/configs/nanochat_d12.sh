NPROC=8
torchrun --standalone --nproc_per_node=$NPROC -m scripts.base_train -- \
    --depth=12 --device-batch-size=32 --total-batch-size=524288 --num-iterations=2205 \
    --warmdown-ratio=0.4 --final-lr-frac=0.0 --run=dummy --matrix-lr=0.02
