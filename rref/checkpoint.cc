// One file, though long: a load reads what a save writes.
#include "stitch/rref/checkpoint.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <deque>
#include <memory>
#include <regex>
#include <set>
#include <thread>

#include "stitch/base/descriptor.h"
#include "stitch/base/printable.h"
#include "stitch/base/random.h"
#include "stitch/rref/checkpoint_manifest.h"
#include "stitch/rref/files/disk_file.h"
#include "stitch/rref/owner_part.h"

namespace stitch {

namespace fs = std::filesystem;
using rref::CheckpointPart;
using rref::Manifest;
using rref::OwnerPart;
using rref::StoredParameter;
using rref::TensorStream;

namespace {

constexpr std::size_t kUnderWay = 4;  // pieces at a time: memory for 16 MiB

[[noreturn]] void refuse(const fs::path& path, const std::string& why) {
  throw Error(ErrorCode::invalid_argument, base::printable(path.string()) + ": " + why);
}
std::string in_quotes(const std::string& name) { return '"' + base::printable(name) + '"'; }

void expect_name(const std::string& name) {
  const bool fits = !name.empty() && name.size() <= 64 &&
                    std::all_of(name.begin(), name.end(), [](unsigned char each) {
                      return std::isalnum(each) != 0 || each == '-' || each == '_';
                    });
  if (!fits)
    throw Error(ErrorCode::invalid_argument,
                "name " + in_quotes(name) +
                    " of a checkpoint, or of a part, is not 1 to 64 letters, digits, '-' and '_'");
}

// The files of one save that are there.
struct Save {
  fs::path manifest;  // comes last: a save without it is not complete
  std::vector<fs::path> others;
};
using Saves = std::map<std::uint64_t, Save>;

std::string name_of(const std::string& checkpoint, std::uint64_t number) {
  return checkpoint + '.' + std::to_string(number) + '.';
}
std::string name_of(const std::string& checkpoint, std::uint64_t number, const std::string& part,
                    std::size_t owner) {
  return name_of(checkpoint, number) + part + '.' + std::to_string(owner) + ".safetensors";
}
constexpr std::uint64_t kMaxSaves = 1'000'000'000'000'000'000;  // 18 digits
Saves saves_in(const fs::path& folder, const std::string& checkpoint) {
  const std::regex form(checkpoint +
                        R"(\.(\d{1,18})\.(json|[\w-]+\.\d+\.safetensors)(\.\d+\.part)?)");
  Saves saves;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string file = it->path().filename();
    std::smatch parts;
    if (!std::regex_match(file, parts, form)) continue;
    Save& save = saves[std::stoull(parts[1])];
    if (parts[2] == "json" && !parts[3].matched) {
      save.manifest = it->path();
    } else {
      save.others.push_back(it->path());
    }
  }
  if (error) refuse(folder, "it cannot be read: " + error.message());
  return saves;
}
// Removes all but the newest complete ones, manifests first.
void remove_old(const Saves& saves, std::size_t keep) {
  std::error_code ignored;
  for (auto save = saves.rbegin(); save != saves.rend(); ++save) {
    if (!save->second.manifest.empty() && keep > 0) {
      --keep;
      continue;
    }
    if (!save->second.manifest.empty()) fs::remove(save->second.manifest, ignored);
    for (const auto& file : save->second.others) fs::remove(file, ignored);
  }
}
const fs::path* newest_in(const Saves& saves) {
  for (auto save = saves.rbegin(); save != saves.rend(); ++save) {
    if (!save->second.manifest.empty()) return &save->second.manifest;
  }
  return nullptr;
}
Manifest manifest_in(const fs::path& path) {
  return files::about(path, [&] {
    const auto file = files::map_file(path);
    return rref::read_manifest(
        {reinterpret_cast<const char*>(file.bytes.data()), file.bytes.size()});
  });
}

void make_folder(const fs::path& folder) {
  std::error_code error;
  if (!fs::create_directories(folder, error)) {
    if (error) refuse(folder, "it cannot be made: " + error.message());
    return;
  }
  // The new folder itself is on the disk when the one that has it is.
  const base::Descriptor parent(
      ::open((fs::absolute(folder) / "..").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!parent || ::fsync(parent.get()) != 0) refuse(folder, "it cannot be put on the disk");
}

// A part that is being saved or loaded.
struct Part {
  CheckpointPart part;
  std::vector<std::vector<StoredParameter>> lists;  // of each owner
};
using Parts = std::map<std::string, Part>;

Part part_of(const std::string& name, CheckpointPart made,
             const std::optional<std::chrono::nanoseconds>& timeout) {
  Part part{std::move(made), {}};
  std::vector<Future<std::vector<StoredParameter>>> lists;
  for (auto& owner : part.part.owners) {
    if (timeout) owner = owner.with_timeout(*timeout);
    lists.push_back(owner.rpc_async<&OwnerPart::list>());
  }
  part.lists = when_all(std::move(lists)).get();
  std::set<std::string> names;
  for (const auto& list : part.lists) {
    static_cast<void>(TensorStream(list));  // refuses types and sizes that no tensor has
    for (const auto& parameter : list) {
      if (!names.insert(parameter.name).second)
        throw Error(ErrorCode::invalid_argument, "part " + in_quotes(name) +
                                                     " of a checkpoint has two parameters named " +
                                                     in_quotes(parameter.name));
    }
  }
  return part;
}

// Why a save of `parts` would destroy another program's: empty when it has nothing that they lack.
std::string difference(const Manifest& saved, const Parts& parts) {
  for (const auto& [name, part] : saved.parts) {
    const auto own = parts.find(name);
    if (own == parts.end()) return "it has part " + in_quotes(name) + ", which this one has not";
    if (own->second.part.type != part.type)
      return "its part " + in_quotes(name) + " is of a " + base::printable(part.type) + ", not a " +
             own->second.part.type;
    std::map<std::string, const StoredParameter*> owned;
    for (const auto& list : own->second.lists) {
      for (const auto& parameter : list) owned.emplace(parameter.name, &parameter);
    }
    for (const auto& file : part.files) {
      for (const auto& parameter : file.parameters) {
        const auto found = owned.find(parameter.name);
        if (found == owned.end())
          return "it has parameter " + in_quotes(parameter.name) + " in part " + in_quotes(name) +
                 ", which this one has not";
        if (found->second->text() != parameter.text())
          return "it has parameter " + in_quotes(parameter.name) + " as " + parameter.text() +
                 ", here it is " + found->second->text();
      }
    }
  }
  return {};
}

// The pieces of one stream. `begin` sends the request for one and returns what ends it.
struct Transfer {
  std::vector<TensorStream::Piece> pieces;
  std::function<std::function<void()>(const TensorStream::Piece&)> begin;
};
// All at the same time, the pieces of each in order.
void run(const std::vector<Transfer>& transfers) {
  std::deque<std::function<void()>> under_way;
  const auto end_first = [&] {
    under_way.front()();
    under_way.pop_front();
  };
  bool more = true;
  for (std::size_t i = 0; more; ++i) {
    more = false;
    for (const auto& transfer : transfers) {
      if (i >= transfer.pieces.size()) continue;
      more = true;
      if (under_way.size() == kUnderWay) end_first();
      under_way.push_back(transfer.begin(transfer.pieces[i]));
    }
  }
  while (!under_way.empty()) end_first();
}

// A file that a save writes.
struct OutFile {
  explicit OutFile(fs::path to) : path(std::move(to)), file(path) {}
  void write(const void* data, std::size_t size) {
    const std::jthread beside([&] { checksum.add(data, size); });
    file.write(data, size);
    bytes += size;
  }
  const fs::path path;
  files::NewFile file;
  files::Checksum checksum;
  std::uint64_t bytes = 0;
};

std::string header_of(const std::vector<StoredParameter>& parameters) {
  std::vector<files::TensorInfo> infos;
  for (const auto& parameter : parameters) {
    for (const auto& tensor : parameter.tensors) {
      const auto* const type = files::find_type(&files::ElementType::safetensors, tensor.dtype);
      infos.push_back({parameter.name_of(tensor), type->type, tensor.sizes});
    }
  }
  return files::safetensors_header(infos);
}

// The tensors that a load has found for one owner.
struct Source {
  RRef<OwnerPart> owner;
  std::vector<StoredParameter> parameters;
  std::vector<std::vector<at::Tensor>> tensors;  // of each parameter, in the order of its tensors
};

// The tensors of the files of a part, by the names of their parameters.
using Found = std::map<std::string, std::pair<StoredParameter, std::vector<at::Tensor>>>;
using Files = std::vector<files::FileBytes>;
Found read_part(const fs::path& manifest, const std::string& begin, const std::string& name,
                const Manifest::Part& part, Files& mapped) {
  Found found;
  for (std::size_t k = 0; k < part.files.size(); ++k) {
    const auto& entry = part.files[k];
    if (entry.file != begin + name + '.' + std::to_string(k) + ".safetensors")
      refuse(manifest, "it names file " + in_quotes(entry.file) + ", which no save writes");
    const fs::path path = manifest.parent_path() / entry.file;
    files::about(path, [&] {
      const auto& file = mapped.emplace_back(files::map_file(path));
      files::Checksum checksum;
      for (std::size_t at = 0, size = 0; at < file.bytes.size(); at += size) {
        size = std::min<std::size_t>(file.bytes.size() - at, TensorStream::kPieceBytes);
        checksum.add(&file.bytes[at], size);
        files::drop_pages(file, &file.bytes[at], size);
      }
      if (file.bytes.size() != entry.bytes || checksum.text() != entry.checksum)
        files::refuse("it is damaged: its size or checksum is not that of " +
                      base::printable(manifest.string()) +
                      "; to load an older save, remove that one");
      const auto tensors = files::read_safetensors(file);
      for (const auto& parameter : entry.parameters) {
        auto& [stored, values] = found[parameter.name];
        if (!stored.name.empty() || !values.empty())
          files::refuse("parameter " + in_quotes(parameter.name) + " is there twice");
        stored = parameter;
        for (auto& each : stored.tensors) {
          const auto tensor = tensors.find(stored.name_of(each));
          if (tensor == tensors.end())
            files::refuse("it has no " + files::tensor_text(stored.name_of(each)));
          each.dtype = files::element_type(tensor->second.scalar_type()).safetensors;
          each.sizes = tensor->second.sizes().vec();
          values.push_back(tensor->second);
        }
      }
    });
  }
  return found;
}

// Adds the source of each owner of a part. Throws for a parameter that does not fit.
void find_sources(const fs::path& manifest, const std::string& name, const Part& part, Found found,
                  std::vector<Source>& sources) {
  for (std::size_t i = 0; i < part.lists.size(); ++i) {
    auto& source = sources.emplace_back(Source{part.part.owners[i], {}, {}});
    for (const auto& own : part.lists[i]) {
      auto saved = found.extract(own.name);
      if (saved.empty())
        refuse(manifest, "part " + in_quotes(name) + " has no parameter " + in_quotes(own.name));
      if (saved.mapped().first.text() != own.text())
        refuse(manifest, "parameter " + in_quotes(own.name) + " of part " + in_quotes(name) +
                             " is " + saved.mapped().first.text() + ", here it is " + own.text());
      source.parameters.push_back(std::move(saved.mapped().first));
      source.tensors.push_back(std::move(saved.mapped().second));
    }
  }
  if (!found.empty())
    refuse(manifest, "part " + in_quotes(name) + " has parameter " +
                         in_quotes(found.begin()->first) + ", which is unknown here");
}

Transfer transfer_to(const Source& source, const Files& mapped) {
  const auto stream = std::make_shared<const TensorStream>(source.parameters);
  return {stream->pieces(), [&source, &mapped, stream](const TensorStream::Piece& piece) {
            at::Tensor bytes = at::empty({static_cast<std::int64_t>(piece.bytes)}, at::kByte);
            for (const auto& slice : stream->slices(piece)) {
              const at::Tensor& tensor = source.tensors[slice.parameter][slice.tensor];
              rref::copy_slice(tensor, slice, bytes.data_ptr<std::uint8_t>() + slice.at);
              const auto* const from = static_cast<std::byte*>(tensor.data_ptr()) + slice.from;
              for (const auto& file : mapped) files::drop_pages(file, from, slice.bytes);
            }
            auto written = source.owner.rpc_async<&OwnerPart::write>(piece.begin, bytes);
            return [written] { written.get(); };
          }};
}

// All owners change, or none.
void take(const std::vector<Source>& sources) {
  std::vector<Future<void>> taken;
  for (const auto& source : sources) taken.push_back(source.owner.rpc_async<&OwnerPart::take>());
  std::exception_ptr failure;
  for (const auto& each : taken) {
    try {
      each.get();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (!failure) return;
  taken.clear();
  for (const auto& source : sources)
    taken.push_back(source.owner.rpc_async<&OwnerPart::take_back>());
  for (const auto& each : taken) static_cast<void>(base::failure_of([&] { each.get(); }));
  std::rethrow_exception(failure);
}

}  // namespace

int rref::register_owner_part() { return 0; }

CheckpointPart rref::checkpoint_of(
    const std::vector<std::pair<std::string, RRef<at::Tensor>>>& tensors) {
  std::map<WorkerId, std::vector<std::pair<std::string, RRef<at::Tensor>>>> by_owner;
  for (const auto& each : tensors) by_owner[each.second.owner().id].push_back(each);
  CheckpointPart part{.type = "tensors", .options = {}, .owners = {}, .check = {}, .loaded = {}};
  for (const auto& [owner, its] : by_owner) part.owners.push_back(remote<OwnerPart>(owner, its));
  return part;
}

Checkpoint::Checkpoint(fs::path folder, CheckpointOptions options)
    : folder_(std::move(folder)), options_(std::move(options)) {
  expect_name(options_.name);
  if (options_.keep == 0)
    throw Error(ErrorCode::invalid_argument, "a checkpoint keeps 0 saves; it keeps 1 or more");
}

void Checkpoint::add_part(const std::string& name, MakePart make) {
  expect_name(name);
  if (!parts_.emplace(name, std::move(make)).second)
    throw Error(ErrorCode::invalid_argument, "checkpoint has two parts named " + in_quotes(name));
}

void Checkpoint::save() const {
  Parts parts;
  for (const auto& [name, make] : parts_) parts[name] = part_of(name, make(), options_.timeout);
  make_folder(folder_);
  const Saves before = saves_in(folder_, options_.name);
  if (const fs::path* const newest = newest_in(before)) {
    const Manifest saved = [&] {
      try {
        return manifest_in(*newest);
      } catch (const Error& error) {
        throw Error(error.code(),
                    std::string(error.what()) + "; to save under its name, remove that file");
      }
    }();
    if (const std::string why = difference(saved, parts); !why.empty())
      refuse(*newest, why +
                          ": it is another program's or another optimizer's; give this "
                          "checkpoint a name of its own, or remove that file");
  }
  remove_old(before, before.size());
  const std::uint64_t number = before.empty() ? 1 : before.rbegin()->first + 1;
  if (number >= kMaxSaves) refuse(folder_, "a file in it has the highest number of a save");

  Manifest manifest;
  manifest.values = values;
  // Values that cannot be written are refused before any file is.
  files::about(folder_, [&] { static_cast<void>(rref::write_manifest(manifest)); });
  std::deque<OutFile> out;
  std::vector<Transfer> transfers;
  for (const auto& [name, part] : parts) {
    auto& entry = manifest.parts[name];
    entry.type = part.part.type;
    entry.options = part.part.options;
    for (std::size_t k = 0; k < part.lists.size(); ++k) {
      const std::string file_name = name_of(options_.name, number, name, k);
      const auto& owner = part.part.owners[k];
      entry.files.push_back({owner.owner().name, file_name, {}, 0, part.lists[k]});
      files::about(folder_ / file_name, [&, &list = part.lists[k]] {
        OutFile& file = out.emplace_back(folder_ / file_name);
        const std::string header = header_of(list);
        file.write(header.data(), header.size());
        transfers.push_back(
            {TensorStream(list).pieces(), [&file, &owner](const TensorStream::Piece& piece) {
               auto read = owner.rpc_async<&OwnerPart::read>(piece.begin, piece.bytes);
               return [&file, read, size = piece.bytes] {
                 const at::Tensor bytes = read.get();
                 files::about(file.path, [&] {
                   if (!rref::is_piece(bytes) || bytes.nbytes() != size)
                     files::refuse("its owner sent another piece");
                   file.write(bytes.data_ptr(), bytes.nbytes());
                 });
               };
             }});
      });
    }
  }
  run(transfers);
  auto file = out.begin();
  for (auto& [name, part] : manifest.parts) {
    for (auto& entry : part.files) {
      files::about(file->path, [&] { file->file.publish(); });
      entry.bytes = file->bytes;
      entry.checksum = file->checksum.text();
      ++file;
    }
  }
  const fs::path path = folder_ / (name_of(options_.name, number) + "json");
  files::about(path, [&] {
    const std::string contents = rref::write_manifest(manifest);
    files::NewFile last(path);
    last.write(contents.data(), contents.size());
    last.publish();
  });
  remove_old(saves_in(folder_, options_.name), options_.keep);
}

void Checkpoint::load() {
  base::start_sodium();
  const Saves saves = saves_in(folder_, options_.name);
  const fs::path* const path = newest_in(saves);
  if (path == nullptr) {
    for (const auto& each : fs::directory_iterator(folder_)) {
      if (each.path().extension() == ".optimizer")
        refuse(each.path(), "it is of an older version of stitch, which this one does not read");
    }
    refuse(folder_, "it has no complete save of a checkpoint named " + in_quotes(options_.name));
  }
  const Manifest manifest = manifest_in(*path);
  std::string begin = path->filename();
  begin.resize(begin.size() - 4);  // without "json"

  Parts parts;
  for (const auto& [name, make] : parts_) parts[name] = part_of(name, make(), options_.timeout);
  Files mapped;
  std::vector<Source> sources;
  std::vector<Future<void>> prepared;
  std::vector<Transfer> transfers;
  for (const auto& [name, part] : parts) {
    const auto saved = manifest.parts.find(name);
    if (saved == manifest.parts.end()) refuse(*path, "it has no part " + in_quotes(name));
    if (saved->second.type != part.part.type)
      refuse(*path, "its part " + in_quotes(name) + " is of a " +
                        base::printable(saved->second.type) + ", not a " + part.part.type);
    if (const auto& check = part.part.check)
      files::about(*path, [&, &options = saved->second.options] { check(options); });
    find_sources(*path, name, part, read_part(*path, begin, name, saved->second, mapped), sources);
  }
  auto source = sources.begin();
  for (const auto& [name, part] : parts) {
    for (std::size_t i = 0; i < part.lists.size(); ++i, ++source)
      prepared.push_back(source->owner.rpc_async<&OwnerPart::prepare>(
          source->parameters, manifest.parts.at(name).options));
  }
  for (const auto& each : prepared) {
    try {
      each.get();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::remote_exception) throw;
      refuse(*path, std::string("it does not fit: ") + error.what());
    }
  }
  for (const auto& each : sources) transfers.push_back(transfer_to(each, mapped));
  run(transfers);
  take(sources);
  for (const auto& [name, part] : parts) {
    if (part.part.loaded) part.part.loaded(manifest.parts.at(name).options);
  }
  values = manifest.values;
}

}  // namespace stitch
