// Files of tensors: they are read as they were written, by bits; a damaged one is refused, and a
// save that fails leaves the old file.
#include "stitch/rref/files/tensor_file.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <climits>
#include <cstring>
#include <fstream>
#include <iterator>
#include <thread>

#include "stitch/rref/files/pickle.h"
#include "stitch/rref/files/zip_file.h"
#include "tests/rref/every_type.h"
#include "tests/support/error_of.h"
#include "tests/support/temporary_folder.h"

namespace tensor_file_test {
namespace {

namespace fs = std::filesystem;
using stitch::Error;
using stitch::ErrorCode;
using stitch::testing::error_of;
using stitch::testing::every_type;
using stitch::testing::has_text;
using stitch::testing::same_bits;
using stitch::testing::TemporaryFolder;
using Tensors = std::map<std::string, at::Tensor>;

std::string contents(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write(const fs::path& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
}
std::size_t files_in(const fs::path& folder) {
  return static_cast<std::size_t>(
      std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

// Both formats.
class TensorFile : public ::testing::TestWithParam<std::string> {
 protected:
  [[nodiscard]] fs::path path(const std::string& name = "model") const {
    return folder_.path() / (name + GetParam());
  }
  [[nodiscard]] Tensors written_and_read(const Tensors& tensors) const {
    stitch::save(path(), tensors);
    return stitch::load(path());
  }
  [[nodiscard]] bool is_pt() const { return GetParam() == ".pt"; }
  [[nodiscard]] Error refusal(const Tensors& tensors) const {
    return error_of([&] { stitch::save(path(), tensors); });
  }
  [[nodiscard]] const fs::path& folder() const { return folder_.path(); }

 private:
  const TemporaryFolder folder_;
};

TEST_P(TensorFile, KeepsTheBitsOfEveryType) {
  const Tensors tensors = every_type(is_pt());
  EXPECT_GE(tensors.size(), is_pt() ? 12U : 11U);
  EXPECT_TRUE(same_bits(written_and_read(tensors), tensors));
}

TEST_P(TensorFile, KeepsTheValuesOfEveryLayout) {
  const at::Tensor base = torch::arange(24, torch::kFloat).reshape({2, 3, 4});
  const at::Tensor complex = torch::view_as_complex(torch::randn({3, 2}));
  const Tensors tensors{
      {"transposed", base.transpose(0, 2)},
      {"sliced", base.slice(2, 1, 4, 2)},
      {"expanded", torch::arange(3).expand({4, 3})},
      {"channels last", torch::randn({2, 3, 4, 5}).to(torch::MemoryFormat::ChannelsLast)},
      {"conjugated", complex.conj()},
      {"negated", torch::imag(complex.conj())},
      {"zeros", torch::_efficientzerotensor({2, 2})},
      {"number", torch::tensor(3.5)},
      {"none", torch::empty({0, 3}, torch::kLong)},
      {"none of many", torch::empty({2, 0}, torch::kBool)},
      {"leaf", torch::ones({2}).set_requires_grad(true)},
      {"shared", base},
  };
  const Tensors read = written_and_read(tensors);
  ASSERT_EQ(read.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    SCOPED_TRACE(name);
    EXPECT_EQ(read.at(name).sizes(), tensor.sizes());
    EXPECT_EQ(read.at(name).scalar_type(), tensor.scalar_type());
    EXPECT_TRUE(at::equal(read.at(name), tensor.detach().resolve_conj().resolve_neg().clone()));
    EXPECT_TRUE(read.at(name).is_contiguous());
    EXPECT_FALSE(read.at(name).requires_grad());
  }
}

TEST_P(TensorFile, KeepsNamesOfAnyCharacters) {
  Tensors tensors;
  for (const std::string& name :
       {std::string(), std::string("layer.0.weight"), std::string("\"\\\n\t\x01\x7f"),
        std::string("a\0b", 3), std::string("\xd0\xba\xd0\xbb\xd1\x8e\xd1\x87"),
        std::string("\xe5\x90\x8d"), std::string("\xf0\x9f\x94\xa5"), std::string(5000, 'x')})
    tensors[name] = torch::tensor(static_cast<double>(tensors.size()));
  EXPECT_TRUE(same_bits(written_and_read(tensors), tensors));
}

TEST_P(TensorFile, OfNoTensorsIsRead) { EXPECT_TRUE(written_and_read({}).empty()); }

TEST_P(TensorFile, RefusesWhatItCannotHave) {
  const auto refused = [&](const std::string& name, const at::Tensor& tensor,
                           const std::string& why) {
    EXPECT_TRUE(has_text(refusal({{name, tensor}}), ErrorCode::invalid_argument, why));
  };
  const at::Tensor one = torch::ones({2});
  refused("\xff", one, "the name of tensor \"?\" is not UTF-8");
  refused("\xed\xa0\x80", one, "is not UTF-8");  // half of a character of UTF-16
  refused("a", {}, "tensor \"a\" is undefined");
  refused("a", torch::eye(2).to_sparse(), "tensor \"a\" is not dense");
  refused("a", torch::empty({2}, torch::kMeta), "tensor \"a\" is not dense, or has no memory");
  refused("a", torch::quantize_per_tensor(one, 0.1, 0, torch::kQInt8), "of type QInt8");
  refused("a", torch::empty({2}, torch::kComplexHalf), "of type ComplexHalf, which no file has");
  at::Tensor freed = torch::ones({3});
  freed.storage().unsafeGetStorageImpl()->set_nbytes(4);
  refused("a", freed, "tensor \"a\" has less memory than its elements take");
  if (!is_pt()) {
    refused("__metadata__", one, "tensor \"__metadata__\" needs another name, or a .pt file");
    refused("a", torch::ones({2}, torch::kComplexDouble), "ComplexDouble, which only .pt files");
  }
  EXPECT_EQ(files_in(folder()), 0U);
}

TEST_P(TensorFile, IsMappedAndNotChangedByItsReader) {
  const at::Tensor weight = torch::arange(6, torch::kDouble).reshape({2, 3});
  stitch::save(path(), {{"weight", weight}, {"mask", torch::ones({2}, torch::kBool)}});
  const std::string before = contents(path());
  at::Tensor read = stitch::load(path()).at("weight");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(read.data_ptr()) % 64, 0U);
  read.mul_(2);
  EXPECT_TRUE(at::equal(read, weight * 2));
  EXPECT_EQ(contents(path()), before);
  EXPECT_TRUE(at::equal(stitch::load(path()).at("weight"), weight));
  // In place of the file that it is read from.
  stitch::save(path(), {{"weight", read}});
  EXPECT_TRUE(at::equal(read, weight * 2));
  EXPECT_TRUE(at::equal(stitch::load(path()).at("weight"), weight * 2));
}

TEST_P(TensorFile, IsReplacedWholeOrNotAtAll) {
  stitch::save(path(), {{"old", torch::ones({2})}});
  const std::string before = contents(path());
  {
    rlimit limit{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
    const rlimit small{4096, limit.rlim_max};
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
    const Error error = refusal({{"new", torch::ones({100000})}});
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    EXPECT_TRUE(has_text(error, ErrorCode::invalid_argument,
                         path().string() + ": it cannot be written completely: "));
  }
  EXPECT_EQ(contents(path()), before);
  EXPECT_EQ(files_in(folder()), 1U);

  stitch::save(path(), {{"new", torch::ones({3})}});
  EXPECT_EQ(stitch::load(path()).begin()->first, "new");
  EXPECT_EQ(files_in(folder()), 1U);
  struct stat state {};
  ASSERT_EQ(::stat(path().c_str(), &state), 0);
  EXPECT_EQ(state.st_mode & 0777, 0600U);
}

TEST_P(TensorFile, MayHaveTheLongestName) {
  const fs::path longest = path(std::string(NAME_MAX - GetParam().size(), 'n'));
  stitch::save(longest, {{"a", torch::ones({2})}});
  EXPECT_EQ(stitch::load(longest).size(), 1U);
  EXPECT_EQ(files_in(folder()), 1U);
}

TEST_P(TensorFile, SavesOfOnePathAtATimeLeaveOneOfThem) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (int k = 0; k < 5; ++k) stitch::save(path(), {{"a", torch::full({1000}, i)}});
    });
  }
  for (auto& thread : threads) thread.join();
  const at::Tensor read = stitch::load(path()).at("a");
  EXPECT_TRUE(at::equal(read, torch::full({1000}, read[0].item<std::int64_t>())));
  EXPECT_EQ(files_in(folder()), 1U);
}

TEST_P(TensorFile, SaysWhyAPathCannotBeUsed) {
  const auto unread = [&](const fs::path& file, const std::string& why) {
    EXPECT_TRUE(has_text(error_of([&] { static_cast<void>(stitch::load(file)); }),
                         ErrorCode::invalid_argument, file.string() + ": " + why));
  };
  unread(path(), "it cannot be read: No such file or directory");
  fs::create_directory(path("folder"));
  unread(path("folder"), "it is not a regular file");
  write(path("empty"), "");
  unread(path("empty"), "it is empty");
  unread(folder() / "model.bin", "its ending is neither .safetensors nor .pt");
  const auto unwritten = [&](const fs::path& file, const std::string& why) {
    EXPECT_TRUE(has_text(error_of([&] { stitch::save(file, {}); }), ErrorCode::invalid_argument,
                         file.string() + ": " + why));
  };
  unwritten(folder() / "model", "its ending is neither .safetensors nor .pt");
  unwritten(folder() / "none" / ("a" + GetParam()), "it cannot be written, as its folder cannot");
  unwritten(path("folder"), "it cannot be put in place: Is a directory");
  write(folder() / "kept", "bytes");
  const fs::path hidden = folder() / ("kept" + std::string(1, '\0') + GetParam());
  EXPECT_TRUE(stitch::testing::contains(error_of([&] { stitch::save(hidden, {}); }).what(),
                                        "its path has a NUL"));
  EXPECT_EQ(contents(folder() / "kept"), "bytes");
}

TEST_P(TensorFile, ThatIsCutAnywhereIsRefused) {
  stitch::save(path(), {{"a", torch::ones({3})}, {"b", torch::ones({2, 2}, torch::kLong)}});
  const std::string whole = contents(path());
  for (std::size_t size = 0; size < whole.size(); ++size) {
    write(path("cut"), whole.substr(0, size));
    EXPECT_EQ(error_of([&] { static_cast<void>(stitch::load(path("cut"))); }).code(),
              ErrorCode::invalid_argument)
        << size;
  }
}

INSTANTIATE_TEST_SUITE_P(With, TensorFile, ::testing::Values(".safetensors", ".pt"),
                         [](const auto& info) { return info.param.substr(1); });

// A file that is made by hand.
class DamagedFile : public ::testing::Test {
 protected:
  [[nodiscard]] Tensors read(const std::string& ending, const std::string& bytes) const {
    const fs::path path = folder_.path() / ("file" + ending);
    write(path, bytes);
    return stitch::load(path);
  }
  void refused(const std::string& ending, const std::string& bytes, const std::string& why) const {
    EXPECT_TRUE(has_text(error_of([&] { static_cast<void>(read(ending, bytes)); }),
                         ErrorCode::invalid_argument, why));
  }

 private:
  const TemporaryFolder folder_;
};

std::string safetensors(const std::string& header, const std::string& data = "") {
  const std::uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + data;
}

TEST_F(DamagedFile, SafetensorsIsRefusedByItsHeader) {
  const auto refused = [&](const std::string& header, const std::string& data,
                           const std::string& why) {
    DamagedFile::refused(".safetensors", safetensors(header, data), why);
  };
  const auto tensor = [](const std::string& name, const std::string& type, const std::string& shape,
                         const std::string& offsets) {
    return '"' + name + R"(":{"dtype":")" + type + R"(","shape":)" + shape + R"(,"data_offsets":)" +
           offsets + '}';
  };
  DamagedFile::refused(".safetensors", "abc", "it is cut short: it has no length of a header");
  DamagedFile::refused(".safetensors", std::string(8, '\xff'), "at most 100000000 are allowed");
  DamagedFile::refused(".safetensors", std::string("\x09\0\0\0\0\0\0\0{}", 10),
                       "its header takes 9 bytes, it has 2");
  refused("[]", "", "its header does not begin with '{'");
  refused(" {}", "", "its header does not begin with '{'");
  refused("{", "", "its header is not JSON: ");
  refused("{\"\xff\":1}", "", "its header is not JSON: ");
  refused("{}{}", "", "its header is not JSON: ");
  refused(R"({"a":1})", "", R"(tensor "a" has no "dtype")");
  refused(R"({"a":{"dtype":"F32","shape":[]}})", "", R"(has no "data_offsets")");
  refused(R"({"a":{"dtype":4,"shape":[]}})", "", R"(has no "dtype", or one of another type)");
  refused('{' + tensor("a", "F12", "[]", "[0,4]") + '}', "abcd", R"(has dtype "F12")");
  refused('{' + tensor("a", "F32", "[-1]", "[0,4]") + '}', "abcd", "a size is not a whole number");
  refused('{' + tensor("a", "F32", "[1.0]", "[0,4]") + '}', "abcd", "a size is not a whole number");
  refused('{' + tensor("a", "F32", "[9223372036854775808]", "[0,4]") + '}', "abcd",
          "a size is not");
  refused('{' + tensor("a", "F32", "[1]", "[0]") + '}', "abcd", "has not two offsets");
  refused('{' + tensor("a", "F32", "[1]", "[0,\"4\"]") + '}', "abcd", "an offset is not a whole");
  refused('{' + tensor("a", "F32", "[1]", "[0,5]") + '}', "abcde",
          "has 5 bytes, its shape and F32 take 4");
  refused('{' + tensor("a", "F32", "[1]", "[0,8]") + '}', "abcd", "ends at byte 8");
  refused('{' + tensor("a", "F32", "[1]", "[4,0]") + '}', "abcd", "begins at byte 4");
  refused('{' + tensor("a", "F32", "[1]", "[1,5]") + '}', "abcde",
          "begins at byte 1, its place is 0");
  refused('{' + tensor("a", "F32", "[4294967296,4294967296,4]", "[0,0]") + '}', "",
          "more elements than can be counted");
  refused('{' + tensor("a", "F64", "[2305843009213693952]", "[0,0]") + '}', "",
          "more elements than");
  std::string sizes = "[1";
  for (int dimension = 1; dimension < 65; ++dimension) sizes += ",1";
  refused('{' + tensor("a", "U8", sizes + ']', "[0,1]") + '}', "a", "more than 64 dimensions");
  refused('{' + tensor("a", "U8", "[2]", "[0,2]") + ',' + tensor("b", "U8", "[2]", "[1,3]") + '}',
          "abc", R"(tensor "b" begins at byte 1, its place is 2)");
  refused('{' + tensor("a", "U8", "[2]", "[0,2]") + ',' + tensor("b", "U8", "[2]", "[3,5]") + '}',
          "abcde", R"(tensor "b" begins at byte 3, its place is 2)");
  refused('{' + tensor("a", "U8", "[2]", "[0,2]") + '}', "abc", "1 bytes behind its last tensor");
  refused('{' + tensor("a", "BOOL", "[2]", "[0,2]") + '}', "\x01\x02", "a byte of 2 for a bool");
  refused('{' + tensor("a", "U8", "[1]", "[0,1]") + ',' + tensor("a", "U8", "[1]", "[0,1]") + '}',
          "a", R"(its header has "a" twice)");
  refused(R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", "a",
          R"(its header has "dtype" twice)");
  refused(std::string(100000, '[').replace(0, 5, R"({"a":)"), "",
          "its header is nested too deeply");
  refused(std::string("{}\0}", 4), "", "its header has a NUL");
}

TEST_F(DamagedFile, SafetensorsOfOthersAreRead) {
  // Metadata, fields of later versions, data that no boundary aligns, tensors of no bytes between.
  const auto read = DamagedFile::read(
      ".safetensors",
      safetensors(R"({"__metadata__":{"format":"pt"},)"
                  R"("b":{"dtype":"F32","shape":[1],"data_offsets":[1,5],"later":[{}]},)"
                  R"("none":{"dtype":"F64","shape":[0,2],"data_offsets":[1,1]},)"
                  R"("a":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}  )",
                  std::string("\x07\0\0\x80\x3f", 5)));
  ASSERT_EQ(read.size(), 3U);
  EXPECT_EQ(read.at("a").item<int>(), 7);
  EXPECT_EQ(read.at("b").item<float>(), 1.0F);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(read.at("b").data_ptr()) % 4, 0U);
  EXPECT_EQ(read.at("none").sizes(), at::IntArrayRef({0, 2}));
}

// A .pt file with this pickle, and a storage "0" of these bytes.
std::string pt(const std::string& pickle, const std::string& storage = "",
               const std::string& order = "little") {
  std::string file;
  const stitch::files::Sink out = [&](const void* data, std::size_t size) {
    file.append(static_cast<const char*>(data), size);
  };
  stitch::files::ZipWriter zip(out);
  zip.add("name/data.pkl", pickle.data(), pickle.size());
  zip.add("name/byteorder", order.data(), order.size());
  zip.add("name/data/0", storage.data(), storage.size());
  zip.finish();
  return file;
}
std::string text(const std::string& value) {
  const auto size = static_cast<std::uint32_t>(value.size());
  return 'X' + std::string(reinterpret_cast<const char*>(&size), 4) + value;
}
std::string number(int value) {
  return 'J' + std::string(reinterpret_cast<const char*>(&value), sizeof value);
}
std::string tuple(const std::string& values) { return '(' + values + 't'; }
std::string dict(const std::string& items) { return "}(" + items + 'u'; }
std::string storage_of(int elements, const std::string& type = "Float",
                       const std::string& key = "0") {
  return tuple(text("storage") + "ctorch\n" + type + "Storage\n" + text(key) + text("cpu") +
               number(elements)) +
         'Q';
}
std::string tensor_of(const std::string& storage, int offset, const std::string& sizes,
                      const std::string& strides, const std::string& more = "") {
  return "ctorch._utils\n_rebuild_tensor_v2\n" +
         tuple(storage + number(offset) + tuple(sizes) + tuple(strides) +
               "\x89"
               "ccollections\nOrderedDict\n)R" +
               more) +
         'R';
}
std::string tensor_of_two() { return tensor_of(storage_of(2), 0, number(2), number(1)); }

TEST_F(DamagedFile, PtIsRefusedByItsPickle) {
  const std::string bytes(8, '\0');
  const auto refused = [&](const std::string& pickle, const std::string& why) {
    DamagedFile::refused(".pt", pt("\x80\x02" + pickle + '.', bytes), why);
  };
  const auto in_dict = [&](const std::string& value, const std::string& why) {
    refused(dict(text("a") + value), why);
  };
  EXPECT_EQ(read(".pt", pt(dict(text("a") + tensor_of_two()) + '.', bytes)).at("a").numel(), 2);
  DamagedFile::refused(".pt", pt(dict(text("a") + tensor_of_two()), bytes), "damaged or cut short");

  // Classes and functions.
  in_dict("cos\nsystem\n" + tuple(text("false")) + 'R', "it has a value of os.system; plain dicts");
  in_dict("c__torch__\nModule\n)\x81", "it has a value of __torch__.Module");
  in_dict("ctorch._utils\n_rebuild_sparse_tensor\n)R", "torch._utils._rebuild_sparse_tensor");
  in_dict("ctorch\nQInt8Storage\n", "torch.QInt8Storage");
  in_dict("ctorch\nstorage", "a name has no end");
  in_dict("ccollections\nOrderedDict\n" + tuple(number(1)) + 'R', "or is damaged");
  in_dict("ctorch\nFloatStorage\n)R", "or is damaged");
  in_dict(text("os.system") + ")R", "a function is missing, or of another type");
  in_dict(tensor_of(storage_of(2), 0, number(2), number(1), dict(text("conj") + "\x88")),
          "it has a tensor with metadata");
  in_dict(std::string("\x95") + bytes, "its pickle has instruction 149");

  // Storages and tensors.
  in_dict(tensor_of(storage_of(2, "Float", "1"), 0, number(2), number(1)), "has no storage \"1\"");
  in_dict(tensor_of(storage_of(3), 0, number(2), number(1)),
          "storage \"0\" has 8 bytes, 3 elements of 4 are announced");
  in_dict(tensor_of(storage_of(-1), 0, number(2), number(1)), "-1 elements of 4 are announced");
  in_dict(tensor_of(storage_of(2), 0, number(3), number(1)), "beyond its storage of 8 bytes");
  in_dict(tensor_of(storage_of(2), 1, number(2), number(1)), "beyond its storage of 8 bytes");
  in_dict(tensor_of(storage_of(2), 0, number(2), number(2)), "beyond its storage of 8 bytes");
  in_dict(tensor_of(storage_of(2), 3, number(0), number(1)), "beyond its storage of 8 bytes");
  in_dict(tensor_of(storage_of(2), -1, number(1), number(1)), "a tensor has no shape");
  in_dict(tensor_of(storage_of(2), 0, number(2), number(-1)), "a size is negative");
  in_dict(tensor_of(storage_of(2), 0, number(-2), number(1)), "a size is negative");
  in_dict(tensor_of(storage_of(2), 0, number(2), ""), "a tensor has no shape");
  const std::string large = number(1 << 30);
  in_dict(tensor_of(storage_of(2), 0, large + large + large, number(0) + number(0) + number(0)),
          "beyond its storage");
  in_dict(tensor_of(storage_of(2), 0, number(2) + text("x"), number(1)), "a size is missing");
  refused(dict(text("a") + tensor_of_two() + text("b") +
               tensor_of(storage_of(1, "Long"), 0, number(1), number(1))),
          "a storage has two types");
  DamagedFile::refused(
      ".pt",
      pt(dict(text("a") + tensor_of(storage_of(1, "Bool"), 0, number(1), number(1))) + '.', "\x02"),
      "a byte of 2 for a bool");

  // Containers.
  refused(tensor_of_two(), "it has no dict of tensors");
  refused("](" + tensor_of_two() + 'e', "it has no dict of tensors");
  refused(dict(text("a") + tensor_of_two() + text("a") + tensor_of_two()),
          "has tensor \"a\" twice");
  refused(dict("]" + tensor_of_two()), "a key is missing, or of another type");
  refused("}(" + text("a") + 'u', "a container has another type");
  refused("](" + text("a") + tensor_of_two() + 'u', "a container has another type");
  refused("u", "a mark is missing");
  refused("}(s", "a value is missing");
  refused("h\x07", "it uses what it has not kept");
  refused("}q\x01" + text("a") + "h\x01s", "its containers are within one another more often");
  std::string nested = "}q" + std::string(1, '\0');
  for (char level = 1; level < 60; ++level) {
    const std::string inner = std::string("h") + static_cast<char>(level - 1);
    nested += "}(" + text("a") + inner + text("b") + inner + "uq" + level;
  }
  refused(nested, "its containers are within one another more often");
  std::string deep;
  for (int level = 0; level < 100000; ++level) deep += "](";
  refused(deep + std::string(100000, 'e'), "it has no dict of tensors");
  in_dict(deep + std::string(100000, 'e'), "its containers are within one another more often");
}

TEST_F(DamagedFile, PtIsRefusedByItsZip) {
  const std::string file = pt(dict(text("a") + tensor_of_two()) + '.', std::string(8, '\0'));
  ASSERT_EQ(read(".pt", file).size(), 1U);
  DamagedFile::refused(".pt", "no zip file at all, but long enough", "does not end as a zip file");
  DamagedFile::refused(".pt", pt("}.", "", "big"), "it was written on a big-endian machine");
  const auto changed = [&](std::string_view at, std::size_t offset, char value) {
    std::string copy = file;
    copy[copy.rfind(at) + offset] = value;
    return copy;
  };
  using namespace std::string_view_literals;
  const auto central = "PK\x01\x02"sv;  // of the last part
  refused(".pt", changed(central, 10, 8), "its part \"name/data/0\" is compressed or encrypted");
  refused(".pt", changed(central, 8, 1), "is compressed or encrypted");
  refused(".pt", changed(central, 0, 'Q'), "its directory has a gap");
  refused(".pt", changed("PK\x06\x06"sv, 0, 'Q'), "its directory has no end");
  refused(".pt", changed("PK\x03\x04"sv, 0, 'Q'), "is not where it should be");
  refused(".pt", changed("PK\x06\x06"sv, 32, 4), "its directory has a gap");
  std::string shared = file;  // the last part lies where the first one does
  const std::size_t last = shared.rfind(central);
  std::fill_n(shared.begin() + last + 46 + shared[last + 28] + 20, 8, '\0');
  refused(".pt", shared, "its parts overlap");
  refused(".pt", changed("data.pkl"sv, 0, 'D'), "it has no part \"<name>/data.pkl\"");
  std::string twice;
  const stitch::files::Sink out = [&](const void* data, std::size_t size) {
    twice.append(static_cast<const char*>(data), size);
  };
  stitch::files::ZipWriter zip(out);
  zip.add("name/data.pkl", "}.", 2);
  zip.add("name/data.pkl", "}.", 2);
  zip.finish();
  refused(".pt", twice, "its part \"name/data.pkl\" is there twice");
  twice.clear();
  stitch::files::ZipWriter two(out);
  two.add("name/data.pkl", "}.", 2);
  two.add("other/data.pkl", "}.", 2);
  two.finish();
  refused(".pt", twice, "it has two parts \"<name>/data.pkl\"");
}

// Of torch.save: kept inputs of the fuzzers, made by tests/rref/saved_by_torch.py.
class SavedByTorch : public ::testing::TestWithParam<std::string> {};

TEST_P(SavedByTorch, IsReadWithItsViewsAndNestedDicts) {
  const auto read = stitch::load(fs::path(STITCH_FUZZ_CORPUS) / "pt_file" / GetParam());
  std::vector<std::string> names;
  for (const auto& [name, tensor] : read) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"column", "model.bias", "model.weight",
                                             "optimizer.param_groups.0.extra",
                                             "optimizer.state.0.exp_avg", "parameter", "table"}));
  const at::Tensor table = torch::arange(12, torch::kFloat).reshape({3, 4});
  EXPECT_TRUE(at::equal(read.at("table"), table));
  EXPECT_TRUE(at::equal(read.at("column"), table.select(1, 1)));
  EXPECT_EQ(read.at("column").stride(0), 4);
  at::Tensor column = read.at("column");
  column.fill_(7);  // of one storage
  EXPECT_EQ(read.at("table")[2][1].item<float>(), 7);
  EXPECT_TRUE(at::equal(read.at("model.weight"), torch::full({2, 3}, 0.5)));
  EXPECT_TRUE(at::equal(read.at("model.bias"), torch::tensor({1.0, 2.0}, torch::kDouble)));
  EXPECT_TRUE(at::equal(read.at("parameter"), torch::ones({2}, torch::kBFloat16)));
  EXPECT_FALSE(read.at("parameter").requires_grad());
  EXPECT_EQ(read.at("optimizer.state.0.exp_avg").item<std::int64_t>(), 1LL << 40);
  EXPECT_TRUE(at::equal(read.at("optimizer.param_groups.0.extra"), torch::ones({1}, torch::kBool)));
}

INSTANTIATE_TEST_SUITE_P(Version, SavedByTorch, ::testing::Values("torch-1.13.pt", "torch-2.11.pt"),
                         [](const auto& info) {
                           return std::string(info.param == "torch-1.13.pt" ? "1_13" : "2_11");
                         });

}  // namespace
}  // namespace tensor_file_test
