/** What people add to a job: its tags and notes. */
import { Button, TextInput } from '@mantine/core'
import { useMutation, useQuery, useQueryClient } from '@tanstack/react-query'
import { useState } from 'react'

import { call } from '../api/client'
import { jobNotesQuery, useRole } from '../api/queries'
import type { TrainingJob } from '../contract'
import { isOver } from '../model/standing'
import { NOTES } from '../words/incident'
import { JOB_PEOPLE } from '../words/people'
import { Form, Problem, Shown } from './Basics'
import { Card } from './Card'
import { Notes } from './Notes'

/** Limits that the API sets: the number of tags of a job, and the length of a tag's name and value. */
const MOST_TAGS = 50
const MAX_CHARACTERS = 256

export default function JobPeople({ job }: { job: TrainingJob }) {
  const notes = useQuery(jobNotesQuery(job.RunId))
  return (
    <Card title={JOB_PEOPLE.title} label={JOB_PEOPLE.title}>
      <div className="split">
        <div>
          <h3>{JOB_PEOPLE.tags}</h3>
          <Tags job={job} />
        </div>
        <div>
          <h3>{NOTES.title}</h3>
          <Shown query={notes} rows={1}>
            {(found) => (
              <Notes
                notes={found}
                create={(Text, ClientRequestToken) =>
                  call('CreateTrainingJobNote', { TrainingJobName: job.RunId, Text, ClientRequestToken })
                }
              />
            )}
          </Shown>
        </div>
      </div>
    </Card>
  )
}

function Tags({ job }: { job: TrainingJob }) {
  const { mayRun } = useRole()
  const client = useQueryClient()
  const tags = Object.entries(job.Tags ?? {}).toSorted(([a], [b]) => a.localeCompare(b))
  const mayChange = mayRun && !isOver(job)
  const request = useMutation({
    mutationFn: (next: [string, string][]) =>
      call('UpdateTrainingJob', { TrainingJobName: job.RunId, Tags: Object.fromEntries(next) }),
    onSuccess: () => client.invalidateQueries(),
  })
  return (
    <>
      {tags.length === 0 && <p className="dim">{JOB_PEOPLE.noTags}</p>}
      <ul className="plain tags">
        {tags.map(([key, value]) => (
          <li key={key}>
            <span className="dim">{key}</span> {value}
            {mayChange && (
              <button
                type="button"
                className="copy"
                aria-label={JOB_PEOPLE.remove(key)}
                onClick={() => request.mutate(tags.filter(([each]) => each !== key))}
              >
                ×
              </button>
            )}
          </li>
        ))}
      </ul>
      {mayChange && tags.length < MOST_TAGS && (
        <NewTag add={(tag, onSettled) => request.mutate([...tags, tag], { onSettled })} />
      )}
      {mayChange && tags.length >= MOST_TAGS && <p className="dim">{JOB_PEOPLE.tooMany(MOST_TAGS)}</p>}
      {request.error && <Problem error={request.error} title={JOB_PEOPLE.failed} />}
    </>
  )
}

function NewTag({ add }: { add: (tag: [string, string], done: () => void) => void }) {
  const [key, setKey] = useState('')
  const [value, setValue] = useState('')
  const clear = () => {
    setKey('')
    setValue('')
  }
  return (
    <Form className="row" onSubmit={() => add([key.trim(), value.trim()], clear)}>
      <TextInput
        size="xs"
        aria-label={JOB_PEOPLE.key}
        placeholder="team"
        maxLength={MAX_CHARACTERS}
        w={120}
        value={key}
        onChange={(event) => setKey(event.currentTarget.value)}
      />
      <TextInput
        size="xs"
        aria-label={JOB_PEOPLE.value}
        placeholder="vision"
        maxLength={MAX_CHARACTERS}
        w={140}
        value={value}
        onChange={(event) => setValue(event.currentTarget.value)}
      />
      <Button type="submit" size="xs" variant="default" disabled={!key.trim()}>
        {JOB_PEOPLE.add}
      </Button>
    </Form>
  )
}
