#include "tests/fuzz/file_of_tensors.h"

namespace stitch::fuzz {

// The input is a file.
const Target safetensors{
    "safetensors",
    [](Bytes input) { return reads(input, &files::read_safetensors, &files::write_safetensors); },
    [] { return seeds_of_tensors(&files::write_safetensors); }, 512, std::size_t{16} << 20};

}  // namespace stitch::fuzz
