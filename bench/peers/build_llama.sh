#!/bin/sh
# Builds llama_speed from llama.cpp's sources for this CPU, without CMake: the files of ggml's CPU backend and of libllama
# with the options of llama.cpp's own release build (GGML_NATIVE, GGML_OPENMP, GGML_LLAMAFILE, GGML_CPU_REPACK), linked
# into one program.
#
#   bench/peers/build_llama.sh LLAMA_CPP_SOURCES BUILD_DIRECTORY JOBS      (needs gcc 11 or later; x86-64 or aarch64)
set -eu
sources=$(cd "$1" && pwd)
mkdir -p "$2"
build=$(cd "$2" && pwd)
jobs=$3
here=$(cd "$(dirname "$0")" && pwd)
case $(uname -m) in x86_64) arch=x86 ;; aarch64) arch=arm ;; *) echo "neither x86-64 nor aarch64" >&2; exit 1 ;; esac
mkdir -p "$build/include" "$build/objects" "$build/unity"
for template in ggml/src/ggml-version.h.in src/llama-version.h.in; do
    name=$(basename "$template" .in)
    sed 's/@[A-Z_]*NUMBER@/0/g; s/@[A-Z_]*@/unknown/g' "$sources/$template" >"$build/include/$name"
done
# The model files are small and share large headers: sixteen of them are one translation unit, as in CMake's build.
rm -f "$build"/unity/*
ls "$sources"/src/models/*.cpp | awk -v to="$build/unity" '{ printf "#include \"%s\"\n", $0 >> sprintf("%s/models%02d.cpp", to, int((NR - 1) / 16)) }'
plain="-O3 -DNDEBUG -w -fopenmp -D_GNU_SOURCE -D_XOPEN_SOURCE=600 -DGGML_USE_OPENMP -DGGML_SCHED_MAX_COPIES=4 -DGGML_USE_CPU
 -I$build/include -I$sources/ggml/include -I$sources/ggml/src -I$sources/include -I$sources/src"
native="$plain -march=native -DGGML_USE_CPU_REPACK -DGGML_USE_LLAMAFILE -I$sources/ggml/src/ggml-cpu"
# gcc 12 takes the stores that configure AMX tiles for dead ones.
tiles="$native -fno-dse -fno-tree-dse"
list() {
    options=$1
    shift
    for file in "$@"; do
        object=$build/objects/$(echo "${file#"$sources"/}" | tr '/' '_').o
        case $file in *.c) compiler="${CC:-gcc} -std=gnu11" ;; *) compiler="${CXX:-g++} -std=gnu++17" ;; esac
        # shellcheck disable=SC2086
        [ "$object" -nt "$file" ] || echo $compiler $options -c "$file" -o "$object"
    done
}
cpu=$sources/ggml/src/ggml-cpu
{
    list "$plain" "$sources"/src/llama-model.cpp "$build"/unity/*.cpp
    list "$native" "$cpu"/ops.cpp "$cpu"/arch/$arch/*.c* "$cpu"/llamafile/*.cpp "$cpu"/tiled/*.cpp "$cpu"/*.c
    list "$native" $(ls "$cpu"/*.cpp | grep -v -e /ops.cpp)
    list "$tiles" "$cpu"/amx/*.cpp
    list "$plain" $(ls "$sources"/src/*.cpp | grep -v -e /llama-model.cpp) "$sources"/ggml/src/*.c "$sources"/ggml/src/*.cpp
    list "$plain" "$here"/llama_speed.cpp
} | tr '\n' '\0' | xargs -0 -r -n 1 -P "$jobs" sh -c 'eval "$0" || { echo "failed: $0" >&2; exit 255; }'
${CXX:-g++} -fopenmp "$build"/objects/*.o -o "$build/llama_speed" -ldl -lpthread
echo "$build/llama_speed"
