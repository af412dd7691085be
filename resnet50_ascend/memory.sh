# What a rank of the ResNet-50 lessons takes on CPU. Sourced, not run.
# shellcheck shell=bash

# mb_per_rank OPTION...: the memory in MB that a rank takes on CPU with these options of the script; measured were 1,200
# with small pictures and 4,600 with the defaults, and what is above 1,200 grows with the pixels of a batch.
mb_per_rank() {
    local image=224 batch=32
    while (($# > 0)); do
        case "$1" in
            --image-size) image="${2:-}" ;;
            --image-size=*) image="${1#*=}" ;;
            --batch-size) batch="${2:-}" ;;
            --batch-size=*) batch="${1#*=}" ;;
        esac
        shift
    done
    [[ "$image,$batch" =~ ^[1-9][0-9]{0,4},[1-9][0-9]{0,4}$ ]] || image=0 batch=0 # the script will refuse it
    echo $((1200 + image * image * batch * 21 / 10000))
}
