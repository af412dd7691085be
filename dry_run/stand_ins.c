/* Stand-ins for the functions of CANN that MindSpore's Ascend plugin really calls while it simulates.
 *
 * Every other function of CANN that the plugin names becomes `long name(void) { return 0; }` in a file that
 * stand_ins.py writes. 0 is "success" for CANN, but success with no object behind it is not enough here:
 *
 *   function                          why 0 is not enough
 *   --------------------------------  ---------------------------------------------------------------------
 *   ge::StatusFactory::Instance       the plugin registers its error texts in this object while it is loaded
 *   aclrtGetSocName, rtGetSocVersion  the plugin picks its kernels by the chip's name
 *   aclrtGetDeviceCount               the device id is checked against it
 *   aclrtGetMemInfo                   the memory pool asks for its size
 *   aclrtMalloc, aclrtMallocHost      the plugin writes to host memory and counts on distinct addresses
 *   aclrtCreate*                      a null handle means "not created"
 *   memcpy_s, memset_s                libc_sec's bounded copies: here the work itself matters
 *
 * Plain C, nothing of one processor: mangled C++ names are ordinary C identifiers.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* ge::StatusFactory holds one member, a std::map<uint32_t, std::string>, and the plugin's inline code inserts
 * into it. This is an empty one as libstdc++ lays it out (bits/stl_tree.h, _Rb_tree_impl): the comparison,
 * then a sentinel node that is its own left and right neighbour, then the number of nodes. */
struct node {
  int color;
  struct node *parent, *left, *right;
};
static struct {
  char compare;
  struct node sentinel;
  size_t count;
} status_texts = {0, {0, NULL, &status_texts.sentinel, &status_texts.sentinel}, 0};
void *_ZN2ge13StatusFactory8InstanceEv(void) { return &status_texts; }

#define SOC_NAME "Ascend910B1"
const char *aclrtGetSocName(void) { return SOC_NAME; }
int rtGetSocVersion(char *name, uint32_t size) {
  if (size < sizeof SOC_NAME) return 1;
  memcpy(name, SOC_NAME, sizeof SOC_NAME);
  return 0;
}

int aclrtGetDeviceCount(uint32_t *count) { *count = 8; return 0; }
int aclrtGetMemInfo(int attribute, size_t *free_bytes, size_t *total_bytes) {
  (void)attribute;
  *free_bytes = *total_bytes = (size_t)64 << 30;
  return 0;
}

static int allocate(void **address, size_t bytes) {
  *address = malloc(bytes ? bytes : 1);
  return *address == NULL;
}
int aclrtMalloc(void **address, size_t bytes, int policy) { (void)policy; return allocate(address, bytes); }
int aclrtMallocHost(void **address, size_t bytes) { return allocate(address, bytes); }
int aclrtFree(void *address) { free(address); return 0; }
int aclrtFreeHost(void *address) { free(address); return 0; }

static int handle(void **out) { *out = &status_texts; return 0; }
int aclrtCreateContext(void **context, int device) { (void)device; return handle(context); }
int aclrtCreateStream(void **stream) { return handle(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) {
  (void)priority; (void)flag;
  return handle(stream);
}

int memcpy_s(void *to, size_t room, const void *from, size_t bytes) {
  if (bytes > room) return 34; /* ERANGE */
  memcpy(to, from, bytes);
  return 0;
}
int memset_s(void *to, size_t room, int value, size_t bytes) {
  if (bytes > room) return 34;
  memset(to, value, bytes);
  return 0;
}
