#include "diagnose_dump.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "stitch/base/error.h"
#include "stitch/base/own_folder.h"
#include "stitch/base/printable.h"

namespace stitch_run {
namespace {

constexpr std::uintmax_t kMaxFileBytes = std::uintmax_t{64} << 20;
constexpr std::size_t kMaxText = 300;
constexpr std::size_t kMaxFiles = 20'000;

[[noreturn]] void refuse(const std::string& why) { throw std::runtime_error(why); }

using nlohmann::json;

json parse(const std::string& text) {
  constexpr int kMaxDepth = 32;
  try {
    return json::parse(text, [](int depth, json::parse_event_t, const json&) {
      if (depth > kMaxDepth) refuse("values are nested too deeply");
      return true;
    });
  } catch (const json::exception& error) {
    refuse(error.what());
  }
}

// Null for what is no object or has no such member.
const json& member(const json& object, const char* name) {
  static const json nothing;
  const auto found = object.find(name);
  return found == object.end() ? nothing : *found;
}

std::string required_text(const json& dump, const char* name) {
  const json& value = member(dump, name);
  if (!value.is_string()) refuse("\"" + std::string(name) + "\" is missing or is no text");
  return readable(value.get_ref<const std::string&>());
}

double required_number(const json& dump, const char* name) {
  const json& value = member(dump, name);
  if (!value.is_number()) refuse("\"" + std::string(name) + "\" is missing or is no number");
  return value.get<double>();
}

}  // namespace

std::string readable(std::string_view text) {
  std::string result = stitch::base::printable(std::string(text.substr(0, kMaxText)));
  if (text.size() > kMaxText) result += "...";
  return result;
}

const json* DumpRow::find(std::string_view column) const {
  const auto found = std::find(columns_->begin(), columns_->end(), column);
  const auto index = static_cast<std::size_t>(found - columns_->begin());
  return index < cells_->size() && found != columns_->end() ? &(*cells_)[index] : nullptr;
}

std::string DumpRow::text(std::string_view column) const {
  const json* const cell = find(column);
  return cell == nullptr || !cell->is_string() ? "" : readable(cell->get_ref<const std::string&>());
}

double DumpRow::number(std::string_view column) const {
  const json* const cell = find(column);
  return cell == nullptr || !cell->is_number() ? 0 : cell->get<double>();
}

bool DumpRow::has(std::string_view column) const {
  const json* const cell = find(column);
  return cell != nullptr && !cell->is_null();
}

std::vector<DumpRow> Dump::rows(std::string_view table) const {
  std::vector<DumpRow> rows;
  const auto found = tables_.find(table);
  if (found == tables_.end()) return rows;
  for (const DumpRow::Cells& cells : found->second.rows)
    rows.emplace_back(found->second.columns, cells);
  return rows;
}

Dump read_dump(const std::filesystem::path& file) {
  if (!std::filesystem::is_regular_file(file)) refuse("it is no file");
  if (std::filesystem::file_size(file) > kMaxFileBytes)
    refuse("it has more than " + std::to_string(kMaxFileBytes) + " bytes");
  std::ifstream in(file, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  if (!in) refuse("it cannot be read");
  const json read = parse(text);
  const json& version = member(read, "stitch_dump");
  if (!version.is_number()) refuse("it is no dump of stitch");
  if (version != 1) {
    refuse("it is of version " +
           std::to_string(static_cast<long>(std::clamp(version.get<double>(), 0.0, 1e9))) +
           " of dumps, and this program reads version 1");
  }
  Dump dump;
  dump.file = readable(file.filename().string());
  dump.name = required_text(read, "name");
  dump.id = required_number(read, "id");
  dump.epoch = required_number(read, "epoch");
  if (const json& world = member(read, "world"); world.is_string())
    dump.world = readable(world.get_ref<const std::string&>());
  const double pid = required_number(read, "pid");
  dump.pid = pid >= 0 && pid < 1e9 ? static_cast<long>(pid) : 0;
  dump.host = required_text(read, "host");
  dump.reason = required_text(read, "reason");
  dump.time = required_number(read, "time");
  const json& tables = member(read, "tables");
  if (!tables.is_array()) refuse("\"tables\" is missing or is no list");
  for (const json& each : tables) {
    const json& columns = member(each, "columns");
    const json& rows = member(each, "rows");
    if (!columns.is_array() || !rows.is_array()) refuse("a table has no columns or no rows");
    Dump::Table table;
    for (const json& column : columns) {
      if (!column.is_string()) refuse("the name of a column is no text");
      table.columns.push_back(column.get<std::string>());
    }
    for (const json& row : rows) {
      if (!row.is_array() || row.size() != table.columns.size())
        refuse("a row of table \"" + required_text(each, "name") + "\" does not fit its columns");
      table.rows.push_back(row.get_ref<const DumpRow::Cells&>());
    }
    dump.tables_.insert_or_assign(required_text(each, "name"), std::move(table));
  }
  return dump;
}

const Dump* Dumps::find(std::string_view worker) const {
  const auto found = by_worker.find(worker);
  return found == by_worker.end() ? nullptr : &found->second;
}

namespace {

// What a folder has of one world.
struct Run {
  std::map<std::string, Dump, std::less<>> by_worker;
  std::vector<std::string> former_lives;
  double newest = 0;  // dump of it
};

// What a former life of a worker has written says nothing about the one that runs.
void leave_out_former_lives(Run& run) {
  std::map<std::string, double> epochs;
  for (const auto& [name, dump] : run.by_worker) {
    for (const DumpRow& row : dump.rows("members")) {
      double& epoch = epochs[row.text("name")];
      epoch = std::max(epoch, row.number("epoch"));
    }
  }
  std::erase_if(run.by_worker, [&](const auto& each) {
    const auto& [name, dump] = each;
    const auto known = epochs.find(name);
    if (known == epochs.end() || known->second <= dump.epoch) return false;
    char text[80];
    std::snprintf(text, sizeof(text), " is of epoch %.0f, and epoch %.0f runs", dump.epoch,
                  known->second);
    run.former_lives.push_back("\"" + dump.file + "\": worker \"" + name + "\"" + text);
    return true;
  });
}

// The newest files of a folder, of those that are read.
class NewestFiles {
 public:
  void add(const std::filesystem::directory_entry& entry) {
    std::error_code error;
    const auto time = entry.last_write_time(error);
    files_.emplace_back(error ? std::filesystem::file_time_type::min() : time, entry.path());
    if (files_.size() == 2 * kMaxFiles) cut();
  }
  // By name.
  [[nodiscard]] std::vector<std::filesystem::path> take() {
    cut();
    std::vector<std::filesystem::path> paths;
    for (auto& file : files_) paths.push_back(std::move(file.second));
    std::sort(paths.begin(), paths.end());
    return paths;
  }

 private:
  void cut() {
    if (files_.size() <= kMaxFiles) return;
    const auto end = files_.begin() + static_cast<std::ptrdiff_t>(kMaxFiles);
    std::nth_element(files_.begin(), end, files_.end(), std::greater<>());
    files_.erase(end, files_.end());
  }
  std::vector<std::pair<std::filesystem::file_time_type, std::filesystem::path>> files_;
};

std::string other_run_text(const std::string& world, const Run& run, double newest) {
  return (world.empty() ? "files without the number of a world" : "world " + world) +
         ": dumps of " + std::to_string(run.by_worker.size()) + " workers, " +
         std::to_string(static_cast<long long>(std::clamp(newest - run.newest, 0.0, 1e12))) +
         " s older";
}

// The run of the newest dump; the others are named. Empty if none has a dump. Takes it out of
// `runs`.
Dumps newest_run(std::map<std::string, Run>& runs) {
  Dumps dumps;
  auto newest = runs.end();
  for (auto each = runs.begin(); each != runs.end(); ++each) {
    if (each->second.by_worker.empty()) continue;
    if (newest == runs.end() || each->second.newest > newest->second.newest) newest = each;
  }
  if (newest == runs.end()) return dumps;
  for (const auto& [world, run] : runs) {
    if (&run != &newest->second)
      dumps.other_runs.push_back(other_run_text(world, run, newest->second.newest));
  }
  dumps.by_worker = std::move(newest->second.by_worker);
  dumps.former_lives = std::move(newest->second.former_lives);
  return dumps;
}

}  // namespace

Dumps read_dumps(const std::filesystem::path& folder) {
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    refuse("\"" + folder.string() +
           "\" is not a folder; dumps are in the one that Options::dump_dir or STITCH_DUMP_DIR "
           "named");
  }
  if (const auto failure = stitch::base::failure_of(
          [&] { static_cast<void>(stitch::base::open_own_folder(folder)); }))
    refuse("\"" + folder.string() + "\" cannot be believed: " + failure->what());
  NewestFiles newest;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".json") newest.add(entry);
  }
  std::map<std::string, Run> runs;  // by world
  std::vector<std::string> left_out;
  for (const auto& file : newest.take()) {
    try {
      Dump dump = read_dump(file);
      auto& all = runs[dump.world].by_worker;
      const auto found = all.find(dump.name);
      const bool newer = found == all.end() || dump.epoch > found->second.epoch ||
                         (dump.epoch == found->second.epoch && dump.time >= found->second.time);
      if (newer) all.insert_or_assign(dump.name, std::move(dump));
    } catch (const std::exception& why) {
      left_out.push_back("\"" + readable(file.filename().string()) + "\": " + readable(why.what()));
    }
  }
  for (auto& [world, run] : runs) {
    leave_out_former_lives(run);
    for (const auto& [name, dump] : run.by_worker) run.newest = std::max(run.newest, dump.time);
  }
  Dumps dumps = newest_run(runs);
  dumps.left_out = std::move(left_out);
  if (dumps.by_worker.empty()) {
    std::string text = "there is no dump in \"" + folder.string() + "\"";
    for (const std::string& each : dumps.left_out) text += "\n  left out: " + each;
    for (const auto& [world, run] : runs) {
      for (const std::string& each : run.former_lives) text += "\n  left out: " + each;
    }
    refuse(text);
  }
  return dumps;
}

}  // namespace stitch_run
