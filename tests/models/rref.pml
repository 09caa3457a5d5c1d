/* The lifetime of one remote object (rref/lifetime/PROTOCOL.md): worker 0 owns it, worker 1 creates it, worker 2 only ever borrows it. The
   reference is sent up to M times, by and to any of them, and dropped anywhere. Messages arrive in any order; ledgers apply their operations
   once and in order (G4, which the model takes for granted, as it does the epochs of G6). The owner does not die: then every Hold is Lost.

   -DDIES=1, -DDIES=2   that worker dies at any point, is swept, and everything that it held is reclaimed (rref_ends.pml has more ends)
   -DTIMES_OUT          the time of the creation may pass while the function runs, and after it has returned
   -DNEVER_SENT         the request to create the object may certainly never leave
   Broken variants, each of which the verifier must refuse: see the macros BROKEN_... below and CMakeLists.txt. */

#ifndef M
#define M 3
#endif

/* Holds. */
#define NO_HOLD 0
#define CREATING 1
#define BORROWED 2
#define REGISTERING 3
#define REGISTERED 4
#define LOST 5
byte hold[3];
byte handles[3];     /* handles; at the owner, too */

/* The owner's Entry. */
#define UNSEEN 0
#define PLACEHOLDER 1
#define PENDING 2
#define READY 3
#define GONE 4
byte entry;
bool seen; /* CREATE or UNMADE has come; without it, what is deleted may come again */
bool holds_it[3]; /* holders */

/* The outcome of the creation: the owner alone decides it, once. */
#define UNDECIDED 0
#define VALUE 1
#define TIMEOUT 2
byte claimed, outcome, answer;
bool runs;     /* the function */
byte object;   /* 0: there is none, 1: there is one, 2: it has been destroyed */
bool told, unsent; /* others may know the id; the request never left */

/* Messages that carry the reference, and their tokens. The sender's pin lasts until SETTLED. */
#define UNSENT 0
#define FLYING 1
#define CREDITOR 2
#define SETTLING 3
#define SETTLED 4
byte from[M], to[M], token[M];
byte sent;

mtype = { REG, DROP, SETTLE, UNMADE, SWEEP, CLEAN, SWEPT };
/* Ledgers, by sender and receiver: 3 * sender + receiver. */
chan ledger[9] = [8] of { mtype, byte };
bool create_flies, answer_flies, ack_flies[3], gone_flies[3];

bool died, noticed[3];
bool swept;
#ifdef DIES
#define creator_lost (DIES == 1 && noticed[0])
#else
#define creator_lost false
#endif
bool asked; /* CREATE or UNMADE has come */
/* The request to create it has not come, and will not: references to it are lost at the owner. */
#define never_comes (creator_lost && !asked && (entry == UNSEEN || entry == GONE))
byte i, m, h;

#ifdef DIES
#define DIES_OR_1 DIES
#else
#define DIES_OR_1 1
#endif
#ifdef DIES
#define dead(x) (died && x == DIES)
#else
#define dead(x) false
#endif

#define pinned(k, x) (k < M && from[k] == x && token[k] != UNSENT && token[k] != SETTLED)
#define pins(x) (pinned(0, x) || pinned(1, x) || (M > 2 && pinned((M > 2 -> 2 : 0), x)) || (M > 3 && pinned((M > 3 -> 3 : 0), x)))
#ifdef BROKEN_PINS_DO_NOT_KEEP_A_HOLD
#define alive(x) (handles[x] != 0)
#else
#define alive(x) (handles[x] != 0 || pins(x))
#endif

#ifdef BROKEN_TAKES_IN_THE_DEAD
#define flying(k) (token[k] == FLYING && !dead(to[k]))
#else
#define flying(k) (token[k] == FLYING && !dead(to[k]) && !(dead(from[k]) && noticed[to[k]]))
#endif

/* SETTLE of token k is appended to the receiver's ledger to the sender. */
inline settle(k) {
  token[k] = SETTLING;
  if
  :: !dead(from[k]) -> ledger[3 * to[k] + from[k]]!SETTLE(k)
  :: else
  fi
}
inline settle_creditors(x) {
  i = 0;
  do
  :: i < M ->
     if :: token[i] == CREDITOR && to[i] == x -> settle(i) :: else fi;
     i++
  :: else -> break
  od;
  i = 0
}
/* A Hold that is not alive ends. */
inline end_hold(x) {
  if
  :: x != 0 && (hold[x] == BORROWED || hold[x] == LOST) && !alive(x) ->
     settle_creditors(x);
#ifdef NEVER_SENT
     if :: x == 1 && hold[x] == LOST && told -> ledger[3 * x]!DROP(x) :: else fi;
#endif
     hold[x] = NO_HOLD
  :: x != 0 && hold[x] == REGISTERED && !alive(x) -> ledger[3 * x]!DROP(x); hold[x] = NO_HOLD
#ifdef BROKEN_DOES_NOT_WAIT_FOR_THE_ANSWER
  :: x != 0 && hold[x] == CREATING && !alive(x) -> hold[x] = NO_HOLD
#endif
  :: else
  fi
}
inline make_placeholder() {
  assert(entry != GONE); /* G2, G3 */
  if
  :: entry == UNSEEN -> entry = PLACEHOLDER
  :: else
  fi
}

/* A message with the reference arrives. */
inline receive(k) {
  h = to[k];
  if
  :: h == 0 && never_comes -> settle(k) /* it is lost there */
  :: h == 0 && !never_comes -> make_placeholder(); handles[0]++; settle(k)
  :: else ->
     handles[h]++;
     if
     :: hold[h] == NO_HOLD -> hold[h] = BORROWED
     :: else
     fi;
#ifdef BROKEN_SETTLES_BORROWS_AT_ONCE
     if :: true -> settle(k) fi
#else
     if
     :: hold[h] == REGISTERED || hold[h] == LOST -> settle(k)
     :: else -> token[k] = CREDITOR
     fi
#endif
  fi;
  h = 0
}

/* A borrow that lasts is registered. */
inline register(x) {
  hold[x] = REGISTERING;
#ifdef BROKEN_SETTLES_BEFORE_REG
  i = 0;
  do
  :: i < M -> if :: token[i] == CREDITOR && to[i] == x && from[i] == 0 -> settle(i) :: else fi; i++
  :: else -> break
  od;
  ledger[3 * x]!REG(x);
#else
  ledger[3 * x]!REG(x);
  i = 0;
  do
  :: i < M -> if :: token[i] == CREDITOR && to[i] == x && from[i] == 0 -> settle(i) :: else fi; i++
  :: else -> break
  od;
#endif
  i = 0;
#ifdef BROKEN_SETTLES_WHEN_REG_IS_SENT
  settle_creditors(x);
#endif
  skip
}

#ifdef DIES
/* Pins of worker x towards the dead one go. */
inline void_pins(x) {
  i = 0;
  do
  :: i < M ->
     if :: from[i] == x && to[i] == DIES && token[i] != UNSENT -> token[i] = SETTLED :: else fi;
     i++
  :: else -> break
  od;
  i = 0
}
/* Nothing depends any more on what the dead one held. Of its making, what has no Entry has no reference. */
inline drop_the_dead() {
  holds_it[DIES] = false;
  if :: DIES == 1 && entry == UNSEEN -> entry = GONE :: else fi;
  seen = seen || DIES == 1;
  void_pins(0)
}
/* Worker x, which is not the owner, hears of the death: it registers what it has borrowed from the dead one. */
inline notice_borrowed(x) {
#ifndef BROKEN_CLEAN_WITHOUT_REG
  h = 0;
  i = 0;
  do
  :: i < M -> if :: token[i] == CREDITOR && to[i] == x && from[i] == DIES -> h = 1 :: else fi; i++
  :: else -> break
  od;
  i = 0;
  if :: h == 1 && hold[x] == BORROWED && alive(x) -> register(x) :: else fi;
  h = 0;
#endif
#ifdef BROKEN_PINS_TOWARDS_THE_DEAD_GO_AT_ONCE
  void_pins(x);
  end_hold(x);
#endif
  skip
}
#endif

/* The owner of ledger x, on worker y, applies the next operation. */
inline apply(x, y) {
  if
  :: ledger[3 * x + y]?[REG, _] ->
     ledger[3 * x + y]?REG, _;
     if
     :: never_comes -> gone_flies[x] = true
     :: else -> make_placeholder(); holds_it[x] = true; ack_flies[x] = true
     fi
  :: ledger[3 * x + y]?[DROP, _] -> ledger[3 * x + y]?DROP, _; assert(holds_it[x]); holds_it[x] = false
#ifdef NEVER_SENT
  :: ledger[3 * x + y]?[UNMADE, _] ->
     ledger[3 * x + y]?UNMADE, _;
#ifdef BROKEN_FORGETS_THAT_IT_IS_UNMADE
     if :: entry == PLACEHOLDER -> entry = READY :: else fi
#else
     assert(entry == UNSEEN || entry == PLACEHOLDER);
     asked = true;
     entry = READY; /* failed */
#ifndef BROKEN_NO_WORKER_HOLDS_WHAT_IS_UNMADE
     holds_it[x] = true;
#endif
     seen = true
#endif
#endif
  :: ledger[3 * x + y]?[SETTLE, _] -> ledger[3 * x + y]?SETTLE, m; token[m] = SETTLED; m = 0; end_hold(y)
#ifdef DIES
  :: ledger[3 * x + y]?[SWEEP, _] ->
     ledger[3 * x + y]?SWEEP, _;
#ifdef BROKEN_CLEAN_BEFORE_REG
     ledger[3 * y]!CLEAN(0);
#endif
     if :: !noticed[y] -> notice_borrowed(y) :: else fi;
     noticed[y] = true;
#ifndef BROKEN_CLEAN_BEFORE_REG
     ledger[3 * y]!CLEAN(0)
#else
     skip
#endif
  :: ledger[3 * x + y]?[CLEAN, _] -> ledger[3 * x + y]?CLEAN, _; swept = true; drop_the_dead(); ledger[3 * y + x]!SWEPT(0)
  :: ledger[3 * x + y]?[SWEPT, _] -> ledger[3 * x + y]?SWEPT, _; void_pins(y); end_hold(y)
#endif
  fi
}

#ifdef BROKEN_PINS_DO_NOT_KEEP_THE_ENTRY
#define unused_entry (handles[0] == 0 && !holds_it[1] && !holds_it[2])
#else
#define unused_entry (handles[0] == 0 && !pins(0) && !holds_it[1] && !holds_it[2])
#endif
#define deletable ((entry == READY || entry == PLACEHOLDER) && unused_entry)

inline destroy() {
  if :: object == 1 -> object = 2 :: else fi;
  if
  :: !seen -> entry = UNSEEN
  :: else ->
     entry = GONE;
     /* G2: no handle and no message has it any more. */
     assert(dead(1) || handles[1] == 0 || hold[1] == LOST);
     assert(dead(2) || handles[2] == 0 || hold[2] == LOST);
     i = 0;
     do
     :: i < M -> assert(!flying(i) && (token[i] != FLYING || dead(from[i]))); i++
     :: else -> break
     od;
     i = 0
  fi
}

inline send_reference(x, y) {
  from[sent] = x;
  to[sent] = y;
  token[sent] = FLYING;
#ifdef NEVER_SENT
  if :: x == 1 && hold[1] == CREATING -> told = true :: else fi;
#endif
  sent++
}

/* What the owner does at the end of the creation: of its function, or of its time. */
inline conclude(what) {
  if
  :: entry == PENDING ->
     outcome = what;
     if :: what == VALUE -> object = 1 :: else fi;
     entry = READY
  :: else -> skip /* the first outcome stands, a late result is destroyed */
  fi;
  assert(!answer_flies && answer == UNDECIDED); /* one answer */
  answer = what;
  answer_flies = !dead(1);
#ifdef BROKEN_A_TIMEOUT_LETS_THE_CREATOR_GO
  if :: what == TIMEOUT -> holds_it[1] = false :: else fi;
#endif
#ifdef BROKEN_A_TIMEOUT_DELETES_THE_ENTRY
  if :: what == TIMEOUT -> entry = GONE :: else fi;
#endif
  skip
}
#ifdef NEVER_SENT
/* The request certainly never left: a Lost Hold settles what it was lent when it pins nothing. */
inline not_sent() {
  create_flies = false;
  unsent = true;
  hold[1] = LOST;
#ifndef BROKEN_HIDES_UNSENT_CREATIONS
  if :: told -> ledger[3]!UNMADE(0) :: else fi;
#endif
  if :: !pins(1) -> settle_creditors(1) :: else fi;
  end_hold(1)
}
#endif

#define can_send(x, y) (sent < M && handles[x] != 0 && hold[x] != LOST && !dead(x) && !(dead(y) && noticed[x]))
#define can_apply(x, y) (nempty(ledger[3 * x + y]) && !dead(y) && !(dead(x) && noticed[y]))

#ifdef DIES
/* What the dead worker holds, and pins towards it, stay until it is swept: it may have lent on what it was lent. */
inline die() {
  died = true;
  create_flies = create_flies && DIES != 1;
  answer_flies = answer_flies && DIES != 1
}
inline notice(x) {
  noticed[x] = true;
  if
  :: x == 0 ->
     if :: entry == PLACEHOLDER && DIES == 1 -> entry = READY :: else fi;
     ledger[3 - DIES]!SWEEP(0);
#ifdef BROKEN_DROPS_THE_DEAD_AT_ONCE
     drop_the_dead()
#else
     skip
#endif
  :: else -> notice_borrowed(x)
  fi
}
#endif

inline check_rest() {
  if
  :: !died ->
     /* G5: an unused object is deleted */
     assert(((!unsent || told) && entry == GONE) || (unsent && !told && entry == UNSEEN));
     assert(!runs && object != 1);
     assert(unsent || answer == outcome);
     assert(hold[1] == NO_HOLD && hold[2] == NO_HOLD);
     i = 0;
     do
     :: i < M -> assert(token[i] == UNSENT || token[i] == SETTLED); i++
     :: else -> break
     od;
     i = 0
  :: else ->
     assert(swept);
     assert(entry == GONE || (entry == UNSEEN && !seen && DIES_OR_1 != 1));
     assert(handles[3 - DIES_OR_1] == 0 && hold[3 - DIES_OR_1] == NO_HOLD);
     i = 0;
     do
     :: i < M -> assert(token[i] == UNSENT || token[i] == SETTLED || from[i] == DIES_OR_1); i++
     :: else -> break
     od;
     i = 0
  fi
}

init {
  d_step { hold[1] = CREATING; handles[1] = 1; create_flies = true }
  do
  /* Creation. The outcome, a value, an error or a timeout, makes no difference to lifetimes; the
     function may keep a handle. */
  :: atomic { create_flies -> d_step {
       create_flies = false;
       assert(entry == UNSEEN || entry == PLACEHOLDER);
       entry = PENDING;
       runs = true;
       seen = true;
       asked = true;
#ifndef BROKEN_CREATOR_IS_NO_HOLDER
       holds_it[1] = true
#endif
     } }
#ifndef TIMES_OUT
  :: atomic { runs -> if :: entry == PENDING -> handles[0]++ :: skip fi; d_step { runs = false; claimed = VALUE; conclude(VALUE) } }
#else
  /* The end of the function and that of its time are told apart once, before either does anything. */
#ifdef BROKEN_BOTH_ENDS_CONCLUDE
  :: atomic { runs -> if :: entry == PENDING -> handles[0]++ :: skip fi; d_step { runs = false; conclude(VALUE) } }
  :: atomic { entry == PENDING && claimed == UNDECIDED -> d_step { claimed = TIMEOUT; conclude(TIMEOUT) } }
#else
  :: atomic { runs -> if :: entry == PENDING -> handles[0]++ :: skip fi; d_step {
       runs = false;
       if
       :: claimed == UNDECIDED -> claimed = VALUE
       :: else ->
#ifdef BROKEN_A_LATE_RESULT_REPLACES_THE_OUTCOME
          outcome = VALUE;
          object = 1;
#endif
#ifdef BROKEN_KEEPS_A_LATE_RESULT
          object = 1;
#endif
          skip
       fi
     } }
  :: atomic { entry == PENDING && claimed == UNDECIDED -> claimed = TIMEOUT }
  :: atomic { claimed != UNDECIDED && answer == UNDECIDED -> d_step { conclude(claimed) } }
#endif
#ifdef BROKEN_A_TIMEOUT_OF_THE_CREATOR_DROPS_ITS_PINS
  /* By the creator's own clock. */
  :: atomic { hold[1] == CREATING -> d_step {
       i = 0;
       do
       :: i < M -> if :: from[i] == 1 && token[i] != UNSENT -> token[i] = SETTLED :: else fi; i++
       :: else -> break
       od;
       i = 0
     } }
#endif
#endif
#ifdef NEVER_SENT
  :: atomic { create_flies -> d_step { not_sent() } }
#endif
  :: atomic { answer_flies && !dead(1) -> d_step {
       answer_flies = false;
       assert(answer == outcome); /* both sides agree */
       if :: hold[1] == CREATING -> hold[1] = REGISTERED; settle_creditors(1); end_hold(1) :: else fi
     } }
  /* Users. */
  :: atomic { can_send(0, 1) -> d_step { send_reference(0, 1) } }
  :: atomic { can_send(0, 2) -> d_step { send_reference(0, 2) } }
  :: atomic { can_send(1, 0) -> d_step { send_reference(1, 0) } }
  :: atomic { can_send(1, 2) -> d_step { send_reference(1, 2) } }
  :: atomic { can_send(2, 0) -> d_step { send_reference(2, 0) } }
  :: atomic { can_send(2, 1) -> d_step { send_reference(2, 1) } }
  :: atomic { handles[0] != 0 -> handles[0]-- }
  :: atomic { handles[1] != 0 && !dead(1) -> d_step { handles[1]--; end_hold(1) } }
  :: atomic { handles[2] != 0 && !dead(2) -> d_step { handles[2]--; end_hold(2) } }
  /* Messages. */
  :: atomic { flying(0) -> d_step { receive(0) } }
  :: atomic { flying(1) -> d_step { receive(1) } }
#if M > 2
  :: atomic { flying(2) -> d_step { receive(2) } }
#endif
#if M > 3
  :: atomic { flying(3) -> d_step { receive(3) } }
#endif
  /* Ledgers. A borrow that nothing ends is registered some time. */
#ifndef BROKEN_FORGETS_TO_REGISTER
  :: atomic { hold[1] == BORROWED && alive(1) && !dead(1) -> d_step { register(1) } }
  :: atomic { hold[2] == BORROWED && alive(2) && !dead(2) -> d_step { register(2) } }
#endif
  :: atomic { can_apply(1, 0) -> d_step { apply(1, 0) } }
  :: atomic { can_apply(2, 0) -> d_step { apply(2, 0) } }
  :: atomic { can_apply(0, 1) -> d_step { apply(0, 1) } }
  :: atomic { can_apply(2, 1) -> d_step { apply(2, 1) } }
  :: atomic { can_apply(0, 2) -> d_step { apply(0, 2) } }
  :: atomic { can_apply(1, 2) -> d_step { apply(1, 2) } }
  :: atomic { gone_flies[1] && !dead(1) -> d_step { gone_flies[1] = false; hold[1] = LOST; settle_creditors(1); end_hold(1) } }
  :: atomic { ack_flies[1] && !dead(1) -> d_step { ack_flies[1] = false; hold[1] = REGISTERED; settle_creditors(1); end_hold(1) } }
  :: atomic { gone_flies[2] && !dead(2) -> d_step { gone_flies[2] = false; hold[2] = LOST; settle_creditors(2); end_hold(2) } }
  :: atomic { ack_flies[2] && !dead(2) -> d_step { ack_flies[2] = false; hold[2] = REGISTERED; settle_creditors(2); end_hold(2) } }
  :: atomic { deletable -> d_step { destroy() } }
#ifdef DIES
  :: atomic { !died -> d_step { die() } }
  :: atomic { died && !noticed[0] -> d_step { notice(0) } }
  :: atomic { died && !noticed[3 - DIES] -> d_step { notice((3 - DIES)) } }
#endif
  :: else -> break
  od;
  skip; /* no jump into a d_step */
  d_step { check_rest() }
}
