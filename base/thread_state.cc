#include "stitch/base/thread_state.h"

#include <sys/syscall.h>

#include <cstdlib>
#include <fstream>

namespace stitch::base {

namespace {

// The first line of a file of the thread in /proc.
std::string line_of(int thread, const char* file) {
  std::ifstream in("/proc/self/task/" + std::to_string(thread) + "/" + file);
  std::string line;
  std::getline(in, line);
  return line;
}

}  // namespace

std::string thread_state(int thread) {
  const std::string stat = line_of(thread, "stat");
  const auto name_end = stat.rfind(')');  // the name may have brackets in it
  if (name_end == std::string::npos || name_end + 2 >= stat.size()) return "";
  switch (stat[name_end + 2]) {
    case 'R':
      return "computes";
    case 'D':
      return "waits for a disk";
    case 'T':
    case 't':
      return "is stopped";
    default:
      break;
  }
  const std::string call = line_of(thread, "syscall");
  if (call.empty() || call == "running") return call.empty() ? "sleeps or waits" : "computes";
  const long number = std::strtol(call.c_str(), nullptr, 10);
  switch (number) {
    case SYS_futex:
      return "waits for a lock or a condition";
    case SYS_nanosleep:
    case SYS_clock_nanosleep:
      return "sleeps";
    case SYS_read:
    case SYS_recvfrom:
    case SYS_recvmsg:
      return "reads";
    case SYS_ppoll:
    case SYS_epoll_pwait:
#if defined(SYS_poll)
    case SYS_poll:
    case SYS_select:
    case SYS_epoll_wait:
#endif
      return "waits for input";
    case SYS_wait4:
    case SYS_waitid:
      return "waits for a process";
    default:
      return "is blocked in system call " + std::to_string(number);
  }
}

std::string thread_name(int thread) { return line_of(thread, "comm"); }

}  // namespace stitch::base
