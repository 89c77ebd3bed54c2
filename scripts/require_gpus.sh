# For other scripts to source: `require_gpus PYTHON COUNT [LEAST]` ends them unless COUNT is a number of GPUs that PyTorch
# sees, at least LEAST (1). On fewer some would train on the CPU, for hours.
require_gpus() {
    local python="$1" wanted="$2" least="${3:-1}" found
    if [[ ! "$wanted" =~ ^[1-9][0-9]{0,3}$ ]] || (( wanted < least )); then
        echo "GPUS is a number of GPUs, at least $least; got GPUS=$wanted" >&2
        exit 1
    fi
    found="$("$python" -c 'import torch; print(torch.cuda.device_count())')"
    (( found >= wanted )) || { echo "GPUS=$wanted, but PyTorch sees $found; set GPUS to what is there" >&2; exit 1; }
}
