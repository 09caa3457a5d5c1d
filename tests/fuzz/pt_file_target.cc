#include "tests/fuzz/file_of_tensors.h"

namespace stitch::fuzz {

// The input is a file.
const Target pt_file{"pt_file",
                     [](Bytes input) { return reads(input, &files::read_pt, &files::write_pt); },
                     [] { return seeds_of_tensors(&files::write_pt); }, 512, std::size_t{16} << 20};

}  // namespace stitch::fuzz
