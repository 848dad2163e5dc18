// Package rules holds the tests of how the repository is put together: which package may import
// which, and that what the documents link to exists. It has no code of its own; a rule that
// nobody checks does not exist.
package rules
