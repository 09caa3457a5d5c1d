#include "stitch/rpc/agent/dumps.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>
#include <utility>

#include "stitch/base/alternate_stack.h"
#include "stitch/base/errno_text.h"
#include "stitch/rpc/agent/agent.h"
#include "stitch/rpc/agent/bounded_task.h"
#include "stitch/rpc/agent/dump_thread.h"
#include "stitch/rpc/agent/worker_report.h"
#include "stitch/rpc/message/frame_kinds.h"

namespace stitch::rpc {

namespace {

// Reports of workers with more than this are cut off behind a complete table.
constexpr std::size_t kMaxBytes = std::size_t{8} << 20;

[[noreturn]] void fail(const std::string& path) {
  throw Error(ErrorCode::internal,
              "dump \"" + path + "\" cannot be written: " + base::errno_text(errno));
}

// Whole or not at all: readers see no half of a file. Only the user may read it.
void write_file(const std::string& path, const std::string& text) {
  const std::string unfinished = path + ".part";
  const int fd = ::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW,
                        S_IRUSR | S_IWUSR);
  if (fd < 0) fail(unfinished);
  std::size_t written = 0;
  while (written < text.size()) {
    const ssize_t now = ::write(fd, text.data() + written, text.size() - written);
    if (now < 0 && errno == EINTR) continue;
    if (now <= 0) break;
    written += static_cast<std::size_t>(now);
  }
  const int error = errno;
  ::close(fd);
  if (written < text.size() || ::rename(unfinished.c_str(), path.c_str()) != 0) {
    if (written < text.size()) errno = error;
    const int why = errno;
    ::unlink(unfinished.c_str());
    errno = why;
    fail(path);
  }
}

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof(name) - 1) == 0 ? name : "";
}

// A path without its folder.
std::string_view name_in(std::string_view path) { return path.substr(path.rfind('/') + 1); }

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
    throw Error(ErrorCode::invalid_argument,
                "dump_dir \"" + folder + "\" cannot be made: " + base::errno_text(errno));
  }
  running_file_ = folder + "/" + take_name("running");
  try {
    write_file(running_file_, head("running") + "  \"tables\": []\n}\n");
  } catch (const Error& error) {
    throw Error(ErrorCode::invalid_argument,
                "dump_dir \"" + folder + "\" cannot be used: " + error.what());
  }
  running_ = true;
  take_over_files();
  base::use_alternate_stack();  // this is the program's thread, which may overflow its stack
  agent_.outgoing_calls().set_on_timeout(
      [this](const std::vector<OutstandingCall>& calls) { on_timeout(calls); });
  DumpThread::of_this_process().add(agent);
}

void Dumps::stop() noexcept {
  if (agent_.forked()) return;
  {
    // They are files of a former life from now on.
    base::MutexLock lock(mutex_);
    for (const std::string& path : files_)
      DumpThread::of_this_process().give_back_file(name_in(path));
  }
  if (!running_) return;
  DumpThread& process = DumpThread::of_this_process();
  process.remove(&agent_);
  ::unlink(running_file_.c_str());
  process.give_back_file(name_in(running_file_));
}

std::string Dumps::take_name(const std::string& reason) const {
  DumpThread& process = DumpThread::of_this_process();
  const std::string begin = agent_.name() + "." + std::to_string(::getpid()) + ".";
  std::string name;
  do {  // a former life may have had this number, as the first process of a container has
    name = begin + std::to_string(process.next_number()) + "." + as_name(reason) + ".json";
  } while (!process.take_file(name));
  return name;
}

// Its name alone does not say that: names of workers may have dots.
bool Dumps::is_of_former_life(const std::string& path) const {
  constexpr std::size_t kHeadBytes = 4096;
  std::ifstream in(path, std::ios::binary);
  std::string head(kHeadBytes, '\0');
  in.read(head.data(), static_cast<std::streamsize>(head.size()));
  head.resize(static_cast<std::size_t>(in.gcount()));
  const auto has = [&](const char* member, const std::string& text) {
    std::string line = std::string("\n  \"") + member + "\": ";
    append_json(line, text);
    return head.find(line + ",\n") != std::string::npos;
  };
  if (!head.starts_with("{\n  \"stitch_dump\": 1,\n") || !has("name", agent_.name()) ||
      !has("host", host_))
    return false;
  constexpr std::string_view kPid = "\n  \"pid\": ";
  const auto at = head.find(kPid);
  if (at == std::string::npos) return false;
  pid_t pid = 0;
  const char* const digits = head.data() + at + kPid.size();
  if (std::from_chars(digits, head.data() + head.size(), pid).ec != std::errc() || pid <= 0)
    return false;
  // Of a container that was started again, it may be the same number.
  return pid == ::getpid() || (::kill(pid, 0) != 0 && errno == ESRCH);
}

void Dumps::take_over_files() noexcept {
  namespace fs = std::filesystem;
  DumpThread& process = DumpThread::of_this_process();
  try {
    std::vector<std::pair<fs::file_time_type, std::string>> former;
    for (const auto& entry : fs::directory_iterator(agent_.options().dump_dir)) {
      const std::string name = entry.path().filename().string();
      if (!name.starts_with(agent_.name() + ".") || !name.ends_with(".json")) continue;
      if (!fs::is_regular_file(entry.symlink_status())) continue;
      const std::string path = agent_.options().dump_dir + "/" + name;
      // Another worker of this process may run under the same name, in another world.
      if (!is_of_former_life(path) || !process.take_file(name)) continue;
      if (name.ends_with(".running.json")) {
        ::unlink(path.c_str());
        process.give_back_file(name);
      } else {
        std::error_code gone;
        const auto time = entry.last_write_time(gone);
        if (gone) {
          process.give_back_file(name);
        } else {
          former.emplace_back(time, path);
        }
      }
    }
    std::sort(former.begin(), former.end());
    base::MutexLock lock(mutex_);
    for (auto& file : former) files_.push_back(std::move(file.second));
    while (files_.size() > kMaxFiles) {
      ::unlink(files_.front().c_str());
      process.give_back_file(name_in(files_.front()));
      files_.pop_front();
    }
  } catch (const std::exception&) {
    // Others clear the folder, too, or it cannot be listed: there are some files more.
  }
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
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  char time[40];
  std::snprintf(time, sizeof(time), "%.3f", std::chrono::duration<double>(now).count());
  return json + ",\n  \"time\": " + time + ",\n";
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

  const std::string name = take_name(reason);
  const std::string path = where + "/" + name;
  try {
    write_file(path, json);
  } catch (...) {
    DumpThread::of_this_process().give_back_file(name);
    throw;
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
  if (!oldest.empty()) {
    ::unlink(oldest.c_str());
    DumpThread::of_this_process().give_back_file(name_in(oldest));
  }
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

void Dumps::on_timeout(const std::vector<OutstandingCall>& calls) {
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
  std::set<const WorkerInfo*> others;
  for (const OutstandingCall& call : calls) others.insert(call.to);
  ask_others(std::move(others));
}

void Dumps::on_timeout(const std::string& reason, Table rows,
                       const std::vector<WorkerId>& awaited) noexcept {
  if (!running_ || !due()) return;
  try {
    write_soon(reason, std::move(rows));
    ask(awaited);
  } catch (const std::exception&) {
    // It ends without a report.
  }
}

void Dumps::on_shutdown_timeout(Table rows, const std::vector<WorkerId>& awaited) noexcept {
  if (!running_) return;
  static_cast<void>(due());  // soon after this, none is of use
  try {
    ask(awaited);
  } catch (const std::exception&) {
    // They write none.
  }
  try {
    const auto limit = std::chrono::steady_clock::now() + kTimeToWrite;
    static_cast<void>(
        run_until(limit, [this, alive = agent_.shared_from_this(), rows = std::move(rows)] {
          write_quietly("shutdown timed out", rows);
        }));
  } catch (const std::exception&) {
    // It ends without a dump.
  }
}

void Dumps::ask(const std::vector<WorkerId>& awaited) {
  std::set<const WorkerInfo*> others;
  for (const WorkerId id : awaited) others.insert(&agent_.peers().find(id));
  ask_others(std::move(others));
}

void Dumps::write_soon(const std::string& reason, Table rows) {
  DumpThread::of_this_process().post(
      [this, alive = agent_.weak_from_this(), reason, rows = std::move(rows)] {
        if (const auto agent = alive.lock()) write_quietly(reason, rows);
      });
}

void Dumps::on_asked(const WorkerInfo& from) {
  if (!running_ || !due()) return;
  DumpThread::of_this_process().post([this, alive = agent_.weak_from_this(), name = from.name] {
    if (const auto agent = alive.lock()) write_quietly("asked by " + name);
  });
  ask_others({});
}

void Dumps::ask_others(std::set<const WorkerInfo*> others) {
  for (const auto& call : agent_.outgoing_calls().list()) others.insert(call.to);
  for (const WorkerInfo* to : others) {
    if (to->id == agent_.self().id) continue;
    try {
      agent_.send_control(*to, OutMessage(wire::kDump));
    } catch (const Error&) {
      // It is lost, and has nothing to say.
    }
  }
}

}  // namespace stitch::rpc
