/** The request that made a job, as YAML, command line, Python and curl. */
import { SegmentedControl } from '@mantine/core'
import { useState } from 'react'

import type { TrainingJob } from '../contract'
import { asCommand, asCurl, asPython, asYaml, requestOf } from '../model/spec'
import { Command } from '../parts/Basics'

const FORMS = { YAML: asYaml, CLI: asCommand, Python: asPython, curl: asCurl }

export default function SpecTab({ job }: { job: TrainingJob }) {
  const [form, setForm] = useState<keyof typeof FORMS>('YAML')
  return (
    <section className="card stack">
      <SegmentedControl value={form} onChange={(value) => setForm(value as keyof typeof FORMS)} data={Object.keys(FORMS)} aria-label="Shown as" />
      <Command text={FORMS[form](requestOf(job))} />
      <p className="dim">
        The request that would make this job again, under another name: names are not used twice. Its source is stored as <code>{job.Source?.SourceId?.slice(0, 12)}…</code>. A job has one revision so far, so there is nothing to compare it with.
      </p>
    </section>
  )
}
