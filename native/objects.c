/* What objects consist of, asked natively: Python takes a microsecond for each, and whoever saves waits for that.
 *
 * An extension of its own, in the stable ABI: cffi's functions let go of the interpreter, and these need it throughout.
 * Nothing here runs code of the objects that it looks at, so they do not change meanwhile; but for `numbers`, which
 * asks them, and for the items of sets, which are compared while nothing is gone through.
 */
#include "objects.h"

enum { RECENT = 16 }; /* classes at hand */

/* A trace that is made, or compared with one that is known: then nothing is made, which would take as long again. */
typedef struct trace {
    PyObject *made, *known; /* lists; `known` is NULL where one is made */
    Py_ssize_t at;          /* how far it was compared */
} trace;

static int is_like(PyObject *object, PyObject *other)
{
    if (object == other)
        return 1;
    if (Py_TYPE(object) != Py_TYPE(other))
        return 0;
    if (PyUnicode_CheckExact(object) || PyLong_CheckExact(object) || Py_IS_TYPE(object, &PyFrozenSet_Type))
        return PyObject_RichCompareBool(object, other, Py_EQ);
    return 0;
}

/* 0: the trace is another one. */
static int note(trace *into, PyObject *object)
{
    if (!into->known)
        return PyList_Append(into->made, object) < 0 ? -1 : 1;
    if (into->at >= PyList_Size(into->known))
        return 0;
    return is_like(object, PyList_GetItem(into->known, into->at++));
}

static int note_size(trace *into, Py_ssize_t size)
{
    PyObject *number = PyLong_FromSsize_t(size);
    int result = number ? note(into, number) : -1;
    Py_XDECREF(number);
    return result;
}

static int begin_trace(trace *out, PyObject *known)
{
    out->at = 0;
    out->known = known == Py_None ? NULL : known;
    out->made = out->known ? Py_NewRef(known) : PyList_New(0);
    if (out->known && !PyList_Check(known))
        PyErr_SetString(PyExc_TypeError, "a trace is a list");
    return out->made && PyList_Check(out->made) ? 1 : -1;
}

static int is_whole(const trace *compared)
{
    return !compared->known || compared->at == PyList_Size(compared->known);
}

/* A dict's size, its keys, each followed by None if its value is that; the values. 0: it is of another kind. */
static int append_entries(PyObject *dict, trace *into, PyObject *values)
{
    PyObject *key, *value;
    Py_ssize_t at = 0, size = PyDict_Check(dict) ? PyDict_Size(dict) : -1;
    if (size < 0 || (size > 0 && !PyDict_CheckExact(dict))) /* an OrderedDict has an order of its own */
        return 0;
    int result = note_size(into, size);
    while (result > 0 && PyDict_Next(dict, &at, &key, &value)) {
        result = PyUnicode_CheckExact(key) ? note(into, key) : 0;
        if (result > 0 && value == Py_None)
            result = note(into, Py_None);
        if (result > 0 && PyList_Append(values, value) < 0)
            result = -1;
        __builtin_prefetch(value, 1);
    }
    return result;
}

/* What to ask of each object, and where to put the answers. */
typedef struct what {
    PyObject *inner;  /* the attribute with the objects inside an object */
    PyObject *held;   /* tuple of names: attributes whose entries are listed */
    PyObject *noted;  /* those that count only if they are not empty */
    PyObject *absent; /* those that an object does not have of its own */
    PyObject *kinds;  /* set of classes */
    trace trace;
    PyObject *lists; /* of each attribute of `held`, the values */
    PyObject *recent[RECENT]; /* classes that are in `kinds` */
} what;

/* Attributes that are there although they usually are empty, or absent. */
static int append_unusual(PyObject *inside, what *asked)
{
    for (Py_ssize_t at = 0, count = PyTuple_Size(asked->noted); at < count; at++) {
        PyObject *name = PyTuple_GetItem(asked->noted, at), *value = PyDict_GetItemWithError(inside, name);
        if (!value)
            return PyErr_Occurred() ? -1 : 0;
        if (!PyDict_Check(value) && !PyAnySet_Check(value)) /* others may run code of their own */
            return 0;
        if (!(PyDict_Check(value) ? PyDict_Size(value) : PySet_Size(value)))
            continue;
        Py_INCREF(value); /* what is made may have garbage collected */
        PyObject *found = PyFrozenSet_New(value); /* of keys, where it is a dict */
        Py_DECREF(value);
        int result = found ? note(&asked->trace, name) : -1;
        if (result > 0)
            result = note(&asked->trace, found);
        Py_XDECREF(found);
        if (result <= 0)
            return result;
    }
    for (Py_ssize_t at = 0, count = PyTuple_Size(asked->absent); at < count; at++) {
        PyObject *name = PyTuple_GetItem(asked->absent, at);
        if (PyDict_GetItemWithError(inside, name)) {
            int result = note(&asked->trace, name);
            if (result <= 0)
                return result;
        } else if (PyErr_Occurred()) {
            return -1;
        }
    }
    return 1;
}

/* Lets the processor fetch together what is looked at one after the other. */
static void fetch_values(PyObject *inside, PyObject *names)
{
    for (Py_ssize_t at = 0, count = PyTuple_Size(names); at < count; at++)
        __builtin_prefetch(PyDict_GetItem(inside, PyTuple_GetItem(names, at)), 1);
}

/* Few classes, of many objects. */
static int note_kind(PyObject *kind, what *asked)
{
    PyObject **place = asked->recent + (uintptr_t)kind / 64 % RECENT;
    if (*place == kind)
        return 0;
    *place = kind; /* the set holds it */
    return PySet_Add(asked->kinds, kind);
}

/* One object; its inner ones go to `below`. 0: it is of another kind. */
static int look_at(PyObject *object, what *asked, PyObject *below)
{
    PyObject *kind = (PyObject *)Py_TYPE(object), *inside = PyObject_GenericGetDict(object, NULL);
    if (!inside)
        return PyErr_ExceptionMatches(PyExc_AttributeError) ? (PyErr_Clear(), 0) : -1;
    fetch_values(inside, asked->held);
    fetch_values(inside, asked->noted);
    int result = note(&asked->trace, kind);
    if (result > 0 && !asked->trace.known && note_kind(kind, asked) < 0)
        result = -1;
    PyObject *dict = result > 0 ? PyDict_GetItemWithError(inside, asked->inner) : NULL;
    if (result > 0)
        result = dict ? append_entries(dict, &asked->trace, below) : PyErr_Occurred() ? -1 : 0;
    for (Py_ssize_t at = 0, count = PyTuple_Size(asked->held); result > 0 && at < count; at++) {
        dict = PyDict_GetItemWithError(inside, PyTuple_GetItem(asked->held, at));
        PyObject *values = PyList_GetItem(asked->lists, at);
        result = dict ? append_entries(dict, &asked->trace, values) : PyErr_Occurred() ? -1 : 0;
    }
    if (result > 0)
        result = append_unusual(inside, asked);
    Py_DECREF(inside);
    return result;
}

/* Level by level. 0: some object is of another kind, or there are too many levels. */
static int look_at_all(PyObject *root, long levels_max, what *asked)
{
    PyObject *level = PyList_New(0);
    int result = level && PyList_Append(level, root) == 0 ? 1 : -1;
    for (long deep = 0; result > 0 && PyList_Size(level) > 0; deep++) {
        PyObject *below = PyList_New(0);
        if (!below || deep == levels_max)
            result = below ? 0 : -1;
        for (Py_ssize_t at = 0; result > 0 && at < PyList_Size(level); at++) {
            PyObject *object = PyList_GetItem(level, at);
            if (object == Py_None)
                continue;
            result = look_at(object, asked, below);
        }
        Py_DECREF(level);
        level = below;
    }
    Py_XDECREF(level);
    return result;
}

/* An object and all inside it: see _objects.pyi. */
static PyObject *look(PyObject *module, PyObject *arguments)
{
    what asked = {0};
    PyObject *root, *known, *out = NULL;
    long levels_max;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OlUO!O!O!O:look", &root, &levels_max, &asked.inner, &PyTuple_Type, &asked.held,
                          &PyTuple_Type, &asked.noted, &PyTuple_Type, &asked.absent, &known))
        return NULL;
    asked.kinds = PySet_New(NULL);
    asked.lists = PyList_New(0);
    int result = begin_trace(&asked.trace, known) > 0 && asked.kinds && asked.lists ? 1 : -1;
    for (Py_ssize_t at = 0; result > 0 && at < PyTuple_Size(asked.held); at++) {
        PyObject *list = PyList_New(0);
        if (!list || PyList_Append(asked.lists, list) < 0)
            result = -1;
        Py_XDECREF(list);
    }
    if (result > 0)
        result = look_at_all(root, levels_max, &asked);
    if (result > 0)
        result = is_whole(&asked.trace);
    if (result > 0)
        out = PyTuple_Pack(3, asked.trace.made, asked.kinds, asked.lists);
    else if (result == 0)
        out = Py_NewRef(Py_None);
    Py_XDECREF(asked.kinds);
    Py_XDECREF(asked.trace.made);
    Py_XDECREF(asked.lists);
    return out;
}

/* The entries of all dicts in a dict: see _objects.pyi. */
static PyObject *entries(PyObject *module, PyObject *arguments)
{
    PyObject *outer, *known, *key, *value, *out = NULL;
    Py_ssize_t at = 0;
    trace trace;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OO:entries", &outer, &known))
        return NULL;
    PyObject *keys = PyList_New(0), *values = PyList_New(0);
    int result = begin_trace(&trace, known) > 0 && keys && values ? 1 : -1;
    if (result > 0 && !PyDict_Check(outer))
        result = 0;
    while (result > 0 && PyDict_Next(outer, &at, &key, &value)) {
        result = PyDict_CheckExact(value) ? PyList_Append(keys, key) == 0 ? 1 : -1 : 0;
        if (result > 0)
            result = append_entries(value, &trace, values);
    }
    if (result > 0)
        result = is_whole(&trace);
    if (result > 0)
        out = PyTuple_Pack(3, trace.made, keys, values);
    else if (result == 0)
        out = Py_NewRef(Py_None);
    Py_XDECREF(trace.made);
    Py_XDECREF(keys);
    Py_XDECREF(values);
    return out;
}

/* The identities of a list's objects as bytes: see _objects.pyi. */
static PyObject *identities(PyObject *module, PyObject *list)
{
    Py_ssize_t count = PyList_Check(list) ? PyList_Size(list) : -1;
    (void)module;
    if (count < 0) {
        PyErr_SetString(PyExc_TypeError, "a list is needed");
        return NULL;
    }
    PyObject *out = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(void *));
    char *words = out ? PyBytes_AsString(out) : NULL;
    for (Py_ssize_t at = 0; words && at < count; at++) {
        PyObject *object = PyList_GetItem(list, at);
        memcpy(words + at * (Py_ssize_t)sizeof object, &object, sizeof object);
    }
    return out;
}

/* An attribute that is an integer, or a method that answers one. */
typedef struct question {
    PyObject *descriptor, *owner; /* of which class it is one */
    descrgetfunc get;
    PyCFunction call; /* NULL if it must be called in the usual way, or is no method */
    int method;
} question;

static int parse_question(question *out, PyObject *object)
{
    out->get = (descrgetfunc)PyType_GetSlot(Py_TYPE(out->descriptor), Py_tp_descr_get);
    out->call = NULL;
    out->owner = out->get ? PyObject_GetAttrString(out->descriptor, "__objclass__") : NULL;
    if (!out->owner || !PyType_Check(out->owner) || !PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)out->owner)) {
        PyErr_SetString(PyExc_TypeError, "a descriptor is needed, and objects of its class");
        return -1;
    }
    PyObject *bound = out->get(out->descriptor, object, (PyObject *)Py_TYPE(object));
    out->method = bound && PyCallable_Check(bound);
    if (bound && PyCFunction_Check(bound) && PyCFunction_GetFlags(bound) == METH_NOARGS)
        out->call = PyCFunction_GetFunction(bound);
    Py_XDECREF(bound);
    return bound ? 0 : -1;
}

static int ask(const question *asked, PyObject *object, PyTypeObject **kind, int64_t *number)
{
    if (Py_TYPE(object) != *kind) {
        *kind = Py_TYPE(object);
        if (!PyType_IsSubtype(*kind, (PyTypeObject *)asked->owner)) {
            PyErr_SetString(PyExc_TypeError, "an object is of another class");
            return -1;
        }
    }
    PyObject *answer = asked->call     ? asked->call(object, NULL)
                       : asked->method ? PyObject_CallFunctionObjArgs(asked->descriptor, object, NULL)
                                       : asked->get(asked->descriptor, object, (PyObject *)*kind);
    *number = answer ? (int64_t)PyLong_AsUnsignedLongLongMask(answer) : -1;
    Py_XDECREF(answer);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

static int ask_all(PyObject *objects, const question *asked, char *out)
{
    const int tuple = PyTuple_Check(objects);
    const Py_ssize_t count = PySequence_Size(objects);
    PyTypeObject *kind = NULL;
    int64_t number;
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *object = tuple ? PyTuple_GetItem(objects, at) : PyList_GetItem(objects, at);
        if (!object || ask(asked, object, &kind, &number) < 0)
            return -1;
        memcpy(out + at * (Py_ssize_t)sizeof number, &number, sizeof number);
    }
    return 0;
}

/* An integer of each object, as bytes: see _objects.pyi. */
static PyObject *numbers(PyObject *module, PyObject *arguments)
{
    PyObject *objects, *out = NULL;
    question asked = {0};
    (void)module;
    if (!PyArg_ParseTuple(arguments, "OO:numbers", &objects, &asked.descriptor))
        return NULL;
    const Py_ssize_t count = PyTuple_Check(objects) || PyList_Check(objects) ? PySequence_Size(objects) : -1;
    if (count < 0)
        PyErr_SetString(PyExc_TypeError, "a tuple or list is needed");
    else
        out = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    if (out && count > 0) {
        PyObject *first = PyTuple_Check(objects) ? PyTuple_GetItem(objects, 0) : PyList_GetItem(objects, 0);
        if (parse_question(&asked, first) < 0 || ask_all(objects, &asked, PyBytes_AsString(out)) < 0)
            Py_CLEAR(out);
    }
    Py_XDECREF(asked.owner);
    return out;
}

/* Copies pieces of memory one behind the other: see _objects.pyi. */
static PyObject *put_together(PyObject *module, PyObject *arguments)
{
    unsigned long long target;
    Py_buffer sources, sizes;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "Ky*y*:put_together", &target, &sources, &sizes))
        return NULL;
    const uint64_t *from = sources.buf, *bytes = sizes.buf;
    char *to = (char *)(uintptr_t)target;
    const Py_ssize_t count = (sources.len < sizes.len ? sources.len : sizes.len) / (Py_ssize_t)sizeof *from;
    for (Py_ssize_t at = 0; at < count; to += bytes[at], at++) {
        if (at + AHEAD < count)
            __builtin_prefetch((const void *)(uintptr_t)from[at + AHEAD]);
        memcpy(to, (const void *)(uintptr_t)from[at], (size_t)bytes[at]);
    }
    PyBuffer_Release(&sources);
    PyBuffer_Release(&sizes);
    return Py_NewRef(Py_None);
}

/* Some of a list's objects: see _objects.pyi. */
static PyObject *picked(PyObject *module, PyObject *arguments)
{
    PyObject *objects;
    Py_buffer places;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "O!y*:picked", &PyList_Type, &objects, &places))
        return NULL;
    const int64_t *at = places.buf;
    const Py_ssize_t count = places.len / (Py_ssize_t)sizeof *at;
    PyObject *out = PyList_New(count);
    for (Py_ssize_t next = 0; out && next < count; next++) {
        PyObject *object = PyList_GetItem(objects, (Py_ssize_t)at[next]);
        if (!object || PyList_SetItem(out, next, Py_NewRef(object)) < 0)
            Py_CLEAR(out);
    }
    PyBuffer_Release(&places);
    return out;
}

/* The cyclic garbage collector looks at an object no more: see _objects.pyi. */
static PyObject *untracked(PyObject *module, PyObject *object)
{
    (void)module;
    if (PyObject_GC_IsTracked(object))
        PyObject_GC_UnTrack(object);
    return Py_NewRef(object);
}

static PyMethodDef methods[] = {
    {"look", look, METH_VARARGS, NULL},
    {"entries", entries, METH_VARARGS, NULL},
    {"identities", identities, METH_O, NULL},
    {"numbers", numbers, METH_VARARGS, NULL},
    {"put_together", put_together, METH_VARARGS, NULL},
    {"picked", picked, METH_VARARGS, NULL},
    {"untracked", untracked, METH_O, NULL},
    {"study_modules", study_modules, METH_VARARGS, NULL},
    {"modules_again", modules_again, METH_VARARGS, NULL},
    {"study_entries", study_entries, METH_VARARGS, NULL},
    {"entries_again", entries_again, METH_VARARGS, NULL},
    {"study_tensors", study_tensors, METH_VARARGS, NULL},
    {"tensors_again", tensors_again, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "stepwell.native._objects", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit__objects(void)
{
    return PyModuleDef_Init(&definition);
}
