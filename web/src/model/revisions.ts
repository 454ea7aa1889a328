/** Computes what changed between two revisions of a job's request. Pure. */
import type { FieldChange, TrainingJobRevision } from '../contract'

export interface Difference {
  field: string
  before?: string
  after?: string
  applies: FieldChange['Applies']
}

/** Return each field that differs between the revisions `from` and `to`, in alphabetical order, with both values. */
export function difference(revisions: readonly TrainingJobRevision[], from: number, to: number): Difference[] {
  const found = new Map<string, Difference>()
  for (const revision of revisions.toSorted((a, b) => a.Revision - b.Revision)) {
    if (revision.Revision <= from || revision.Revision > to) continue
    for (const change of revision.Changes ?? []) {
      const held = found.get(change.Field)
      const applies = held?.applies === 'NextGeneration' ? held.applies : change.Applies
      const before = held ? held.before : change.Before
      found.set(change.Field, { field: change.Field, before, after: change.After, applies })
    }
  }
  return [...found.values()].filter((each) => each.before !== each.after).sort((a, b) => a.field.localeCompare(b.field))
}
