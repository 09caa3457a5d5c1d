#include "stitch/rpc/agent/dumps.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "stitch/base/errno_text.h"
#include "stitch/base/own_folder.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/bounded_task.h"
#include "stitch/rpc/agent/dump_thread.h"
#include "stitch/rpc/agent/worker_report.h"
#include "stitch/rpc/options/option_name.h"

namespace stitch::rpc {

namespace {

// Reports of workers with more than this are cut off behind a complete table.
constexpr std::size_t kMaxBytes = std::size_t{8} << 20;

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

// "call_timed_out": a reason as a part of a file's name.
std::string as_name(const std::string& reason) {
  std::string name;
  for (const char c : reason.substr(0, 40))
    name += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return name;
}

}  // namespace

void Dumps::start(const std::shared_ptr<Agent>& agent) {
  host_ = host_name();
  const std::string& folder = agent_.options().dump_dir;
  if (folder.empty()) return;
  if (::mkdir(folder.c_str(), S_IRWXU) != 0 && errno != EEXIST) {
    throw Error(ErrorCode::invalid_argument, option_name("dump_dir") + " \"" + folder +
                                                 "\" cannot be made: " + base::errno_text(errno));
  }
  if (const auto failure = base::failure_of([&] {
        const base::Descriptor opened = base::open_own_folder(folder);
        if (::faccessat(opened.get(), ".", W_OK | X_OK, 0) != 0)
          throw Error(ErrorCode::invalid_argument, base::errno_text(errno));
      }))
    throw failure->with_prefix(option_name("dump_dir") + " \"" + folder + "\" cannot be used");
  running_ = true;
  agent_.outgoing_calls().set_on_timeout(
      [this](std::span<const OutstandingCall> calls) { on_timeout(calls); });
  DumpThread::of_this_process().add(agent);
}

void Dumps::stop() noexcept {
  if (running_ && !agent_.forked()) DumpThread::of_this_process().remove(&agent_);
}

std::string Dumps::head(const std::string& reason) const {
  std::string json = "{\n  \"stitch_dump\": 1,\n  \"name\": ";
  append_json(json, agent_.name());
  json += ",\n  \"id\": " + std::to_string(agent_.self().id.value()) +
          ",\n  \"epoch\": " + std::to_string(agent_.self().epoch) +
          // A text: readers of JSON take numbers for doubles, which have not all of its digits.
          ",\n  \"world\": \"" + std::to_string(agent_.world()) + "\"" +
          ",\n  \"pid\": " + std::to_string(::getpid()) + ",\n  \"host\": ";
  append_json(json, host_);
  json += ",\n  \"reason\": ";
  append_json(json, reason);
  // By whole numbers: a locale may have another decimal point than JSON.
  const auto now = std::chrono::duration_cast<std::chrono::milliseconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  const std::string thousandths = std::to_string(1000 + now % 1000).substr(1);
  return json + ",\n  \"time\": " + std::to_string(now / 1000) + '.' + thousandths + ",\n";
}

std::string Dumps::write(const std::string& folder, const std::string& reason,
                         const Table& timed_out) {
  const std::string& where = folder.empty() ? agent_.options().dump_dir : folder;
  if (where.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "a dump needs a folder: give one, or set Options::dump_dir or STITCH_DUMP_DIR");
  }
  std::string json = head(reason) + "  \"tables\": [";
  Report report;
  for (const Page page : kAllPages) rpc::report(agent_, page, report);
  if (!timed_out.name.empty()) {
    const auto same = std::find_if(report.begin(), report.end(), [&](const Table& table) {
      return table.name == timed_out.name;
    });
    if (same == report.end()) {
      report.insert(report.begin(), timed_out);
    } else {
      same->rows.insert(same->rows.begin(), timed_out.rows.begin(), timed_out.rows.end());
    }
  }
  const char* separator = "\n  ";
  for (const Table& table : report) {
    if (json.size() > kMaxBytes) break;
    json += std::exchange(separator, ",\n  ");
    append_json(json, table);
  }
  json += "\n  ]\n}\n";

  const std::string file = agent_.name() + "." + std::to_string(::getpid()) + "." +
                           std::to_string(DumpThread::next_number()) + "." + as_name(reason) +
                           ".json";
  std::string path = where + "/" + file;
  const auto failure = base::failure_of([&] {
    const base::Descriptor opened = base::open_own_folder(where);
    if (!base::write_file(opened.get(), file, json))
      throw Error(ErrorCode::internal, base::errno_text(errno));
  });
  if (failure) {
    throw Error(ErrorCode::internal, "dump \"" + path + "\" cannot be written: " + failure->what());
  }
  std::string oldest;
  {
    base::MutexLock lock(mutex_);
    files_.push_back(path);
    if (files_.size() > kMaxFiles) {
      oldest = std::move(files_.front());
      files_.pop_front();
    }
  }
  if (!oldest.empty()) ::unlink(oldest.c_str());
  return path;
}

void Dumps::write_quietly(const std::string& reason, const Table& timed_out) noexcept {
  try {
    write("", reason, timed_out);
  } catch (const std::exception& error) {
    base::MutexLock lock(mutex_);
    if (!std::exchange(failed_, true)) std::fprintf(stderr, "stitch: %s\n", error.what());
  }
}

bool Dumps::due() {
  base::MutexLock lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return false;
  next_ = now + kInterval;
  return true;
}

void Dumps::on_timeout(std::span<const OutstandingCall> calls) noexcept {
  if (!due()) return;
  const auto now = std::chrono::steady_clock::now();
  Table table{"calls timed out",
              {"call", "function", "to", "to id", "to epoch", "age", "under caller", "under call",
               "under function"}};
  for (const OutstandingCall& call : calls) {
    table.add({call.id, call.function, call.to->name, call.to->id.value(), call.to->epoch,
               now - call.made, Cell(), Cell(), Cell()});
  }
  write_soon("call timed out", std::move(table));
}

void Dumps::on_timeout(const std::string& reason, Table rows) noexcept {
  if (running_ && due()) write_soon(reason, std::move(rows));
}

void Dumps::on_shutdown_timeout(Table rows) noexcept {
  if (!running_) return;
  static_cast<void>(due());  // soon after this, none is of use
  const auto limit = std::chrono::steady_clock::now() + kTimeToWrite;
  static_cast<void>(
      run_until(limit, [this, alive = agent_.shared_from_this(), rows = std::move(rows)] {
        write_quietly("shutdown timed out", rows);
      }));
}

void Dumps::write_soon(const std::string& reason, Table rows) {
  DumpThread::of_this_process().post(
      [this, alive = agent_.weak_from_this(), reason, rows = std::move(rows)] {
        if (const auto agent = alive.lock()) write_quietly(reason, rows);
      });
}

}  // namespace stitch::rpc
