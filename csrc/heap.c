/* A separate heap for large arrays, which a process preloads before glibc (LD_PRELOAD; weft/runtime/memory/heap.py).
 *
 * PyTorch allocates arrays with posix_memalign. In glibc's heap, small allocations fragment the space of freed large
 * arrays, so that the next array of the same size does not fit and the heap grows: by a fifth, and differently in every
 * run.
 *
 * This heap serves large arrays from one range of addresses, in blocks of whole pages (huge pages if available):
 *
 * - allocate: take the smallest free block that is large enough (best fit), and split off the rest; else grow the heap
 * - free: merge the block with free neighbours
 * - only malloc_trim returns memory to the system
 *
 * glibc serves all other requests, and those that do not fit into the range.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LEAST ((size_t)256 << 10) /* bytes of the smallest array that this heap serves */
#define PAGE ((size_t)4096)
#define HUGE_PAGE ((size_t)2 << 20)
#define TIMES_MEMORY 4 /* size of the range of addresses, relative to the memory of the machine */
#define NODES 1024     /* nodes to allocate at once */

extern void __libc_free(void* array);
extern void* __libc_realloc(void* array, size_t bytes);

/* Pages [first, first + count) of the range. A list links all blocks in the order of their addresses. */
typedef struct Block {
  size_t first, count;
  struct Block *before, *after;
  struct Block *less, *more; /* previous and next in the list of free blocks */
  int used;
} Block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char* range; /* NULL: not reserved yet */
static size_t range_pages, usable_pages;
static Block** block_at; /* used blocks, by their first page */
static Block *last, *free_blocks, *spare_nodes;
static int refused; /* whether the system has refused to reserve the range */

static char* address(size_t page) { return range + page * PAGE; }

static int is_ours(const void* array) {
  return range != NULL && (const char*)array >= range && (const char*)array < address(range_pages);
}

static void* map(size_t bytes, int protection) {
  void* mapping = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return mapping == MAP_FAILED ? NULL : mapping;
}

static int has_range(void) {
  if (range != NULL || refused) return range != NULL;
  const size_t memory = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
  const size_t bytes = TIMES_MEMORY * memory / HUGE_PAGE * HUGE_PAGE;
  char* mapping = map(bytes + HUGE_PAGE, PROT_NONE);
  block_at = map(bytes / PAGE * sizeof(Block*), PROT_READ | PROT_WRITE);
  refused = mapping == NULL || block_at == NULL;
  if (refused) return 0;
  range_pages = bytes / PAGE;
  range = (char*)(((uintptr_t)mapping + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
  return 1;
}

static Block* new_node(void) {
  if (spare_nodes == NULL) {
    Block* nodes = map(NODES * sizeof(Block), PROT_READ | PROT_WRITE);
    for (size_t i = 0; nodes != NULL && i < NODES; ++i) {
      nodes[i].after = spare_nodes;
      spare_nodes = &nodes[i];
    }
  }
  Block* node = spare_nodes;
  if (node != NULL) spare_nodes = node->after;
  return node;
}

static void list_free(Block* block) {
  block->used = 0;
  block->less = NULL;
  block->more = free_blocks;
  if (free_blocks != NULL) free_blocks->less = block;
  free_blocks = block;
}

static void unlist_free(Block* block) {
  if (block->less != NULL) block->less->more = block->more;
  else free_blocks = block->more;
  if (block->more != NULL) block->more->less = block->less;
}

/* Inserts a new block after another one in the list of all blocks. */
static Block* insert(Block* before, size_t first, size_t count) {
  Block* block = new_node();
  if (block == NULL) return NULL;
  *block = (Block){.first = first, .count = count, .before = before, .after = before ? before->after : NULL};
  if (block->after != NULL) block->after->before = block;
  else last = block;
  if (before != NULL) before->after = block;
  return block;
}

/* Merges a block with the next one. */
static void join(Block* block) {
  Block* other = block->after;
  block->count += other->count;
  block->after = other->after;
  if (other->after != NULL) other->after->before = block;
  else last = block;
  other->after = spare_nodes;
  spare_nodes = other;
}

/* Returns a block at the end of the heap, not in the list of free blocks; extends the last block if that is free. */
static Block* grown(size_t count) {
  const size_t end = last != NULL ? last->first + last->count : 0;
  const size_t first = last != NULL && !last->used ? last->first : end;
  if (count > range_pages - first) return NULL;
  if (first + count > usable_pages) {
    const size_t step = HUGE_PAGE / PAGE, upto = (first + count + step - 1) / step * step;
    const size_t bytes = (upto - usable_pages) * PAGE;
    if (upto > range_pages || mprotect(address(usable_pages), bytes, PROT_READ | PROT_WRITE) != 0) return NULL;
    (void)madvise(address(usable_pages), bytes, MADV_HUGEPAGE);
    usable_pages = upto;
  }
  if (first == end) return insert(last, first, count);
  unlist_free(last);
  last->count = count;
  return last;
}

static void* take(size_t bytes) {
  const size_t count = (bytes + PAGE - 1) / PAGE;
  Block* best = NULL;
  if (!has_range()) return NULL;
  for (Block* block = free_blocks; block != NULL; block = block->more) {
    if (block->count >= count && (best == NULL || block->count < best->count)) best = block;
  }
  if (best == NULL) {
    best = grown(count);
    if (best == NULL) return NULL;
  } else {
    unlist_free(best);
    Block* rest = best->count > count ? insert(best, best->first + count, best->count - count) : NULL;
    if (rest != NULL) {
      best->count = count;
      list_free(rest);
    }
  }
  best->used = 1;
  block_at[best->first] = best;
  return address(best->first);
}

static Block* block_of(const void* array) { return block_at[(size_t)((const char*)array - range) / PAGE]; }

static void give_back(void* array) {
  Block* block = block_of(array);
  if (block->after != NULL && !block->after->used) {
    unlist_free(block->after);
    join(block);
  }
  if (block->before != NULL && !block->before->used) {
    block = block->before;
    unlist_free(block);
    join(block);
  }
  list_free(block);
}

static void acquire(void) { pthread_mutex_lock(&lock); }
static void release(void) { pthread_mutex_unlock(&lock); }

__attribute__((constructor)) static void begin(void) { pthread_atfork(acquire, release, release); }

int posix_memalign(void** result, size_t alignment, size_t bytes) {
  static int (*next)(void**, size_t, size_t);
  if (bytes >= LEAST && alignment <= PAGE) {
    acquire();
    void* array = take(bytes);
    release();
    if (array != NULL) {
      *result = array;
      return 0;
    }
  }
  if (next == NULL) *(void**)&next = dlsym(RTLD_NEXT, "posix_memalign");
  return next(result, alignment, bytes);
}

void free(void* array) {
  if (!is_ours(array)) {
    __libc_free(array);
    return;
  }
  const int error = errno; /* free must not change errno */
  acquire();
  give_back(array);
  release();
  errno = error;
}

size_t malloc_usable_size(void* array) {
  static size_t (*next)(void*);
  if (is_ours(array)) return block_of(array)->count * PAGE;
  if (next == NULL) *(void**)&next = dlsym(RTLD_NEXT, "malloc_usable_size");
  return next(array);
}

void* realloc(void* array, size_t bytes) {
  if (!is_ours(array)) return __libc_realloc(array, bytes);
  void* moved = bytes != 0 ? malloc(bytes) : NULL;
  if (moved == NULL && bytes != 0) return NULL;
  const size_t had = malloc_usable_size(array);
  if (moved != NULL) memcpy(moved, array, had < bytes ? had : bytes);
  free(array);
  return moved;
}

int malloc_trim(size_t pad) {
  static int (*next)(size_t);
  acquire();
  for (Block* block = free_blocks; block != NULL; block = block->more) {
    (void)madvise(address(block->first), block->count * PAGE, MADV_DONTNEED);
  }
  release();
  if (next == NULL) *(void**)&next = dlsym(RTLD_NEXT, "malloc_trim");
  return next(pad);
}
