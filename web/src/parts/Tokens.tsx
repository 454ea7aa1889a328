/** The tokens of people, programs and nodes: an administrator creates and revokes them. */
import '@mantine/core/styles/Switch.css'
import { Button, NativeSelect, Switch, TextInput } from '@mantine/core'
import { useMutation, useQuery, useQueryClient } from '@tanstack/react-query'
import { useState } from 'react'

import { call } from '../api/client'
import { tokensQuery } from '../api/queries'
import type { CreateTokenRequest, Token } from '../contract'
import { utc } from '../model/format'
import { TOKENS } from '../words/settings'
import { Ago, Command, Form, Problem, Shown, Status, useNow } from './Basics'
import { Card } from './Card'
import { ConfirmButton } from './ConfirmButton'
import { CopyId } from './CopyId'
import { Table } from './Table'

const DAY_SECONDS = 86_400
const ROLES = ['viewer', 'submitter', 'admin'] as const

/** `own`: id of the session's token. */
export function Tokens({ own }: { own: string }) {
  const [withEnded, setWithEnded] = useState(false)
  const query = useQuery(tokensQuery(withEnded))
  const toggle = (
    <Switch
      size="xs"
      label={TOKENS.withEnded}
      checked={withEnded}
      onChange={(event) => setWithEnded(event.currentTarget.checked)}
    />
  )
  return (
    <Card title={TOKENS.title} actions={toggle}>
      <div className="stack">
        <CreateToken />
        <Shown query={query}>{(tokens) => <TokenTable tokens={tokens} own={own} />}</Shown>
      </div>
    </Card>
  )
}

function CreateToken() {
  const client = useQueryClient()
  const [role, setRole] = useState<CreateTokenRequest['Role']>('viewer')
  const [project, setProject] = useState('')
  const [description, setDescription] = useState('')
  const [days, setDays] = useState('30')
  const [secret, setSecret] = useState('')
  const request = useMutation({
    mutationFn: () =>
      call('CreateToken', {
        Role: role,
        ...(project && role !== 'admin' ? { Project: project } : {}),
        ...(description ? { Description: description } : {}),
        ...(days ? { ExpiresInSeconds: Number(days) * DAY_SECONDS } : {}),
      }),
    onSuccess: (created) => {
      setSecret(created.Secret)
      setDescription('')
      return client.invalidateQueries({ queryKey: ['tokens'] })
    },
  })
  const words = TOKENS.form
  if (secret) return <Secret secret={secret} onDone={() => setSecret('')} />
  return (
    <Form className="row fields" onSubmit={() => request.mutate()}>
      <NativeSelect
        size="xs"
        label={words.role}
        value={role}
        data={ROLES.map((value) => ({ value, label: words.roles[value] }))}
        onChange={(event) => setRole(event.currentTarget.value as typeof role)}
      />
      <TextInput
        size="xs"
        label={words.project}
        placeholder={words.everyProject}
        value={role === 'admin' ? '' : project}
        disabled={role === 'admin'}
        onChange={(event) => setProject(event.currentTarget.value.trim())}
        autoComplete="off"
        spellCheck={false}
      />
      <TextInput
        size="xs"
        label={words.owner}
        value={description}
        onChange={(event) => setDescription(event.currentTarget.value)}
        autoComplete="off"
      />
      <NativeSelect
        size="xs"
        label={words.lifetime}
        value={days}
        data={words.lifetimes.map(([value, label]) => ({ value, label }))}
        onChange={(event) => setDays(event.currentTarget.value)}
      />
      <Button size="xs" type="submit" loading={request.isPending}>
        {words.create}
      </Button>
      {request.error && <Problem error={request.error} title={words.failed} />}
    </Form>
  )
}

function Secret({ secret, onDone }: { secret: string; onDone: () => void }) {
  const words = TOKENS.secret
  return (
    <section className="banner tone-warn" role="status" aria-label={words.label}>
      <div className="stack" style={{ minWidth: 0 }}>
        <strong>{words.text}</strong>
        <Command text={secret} />
        <div>
          <Button size="xs" variant="default" onClick={onDone}>
            {words.done}
          </Button>
        </div>
      </div>
    </section>
  )
}

function TokenTable({ tokens, own }: { tokens: Token[]; own: string }) {
  const now = useNow()
  const columns = TOKENS.columns
  const isExpired = ({ ExpirationTime: at }: Token) => at !== undefined && at <= now
  const owner = ({ TokenId, Description }: Token) =>
    TokenId === own ? TOKENS.own(Description || '–') : Description || '–'
  const scope = ({ FleetName, Project = TOKENS.form.everyProject }: Token) =>
    FleetName ? TOKENS.fleet(FleetName) : Project
  const revoke = ({ TokenId }: Token) => (
    <ConfirmButton
      label={TOKENS.revokeToken(TokenId)}
      name={TokenId}
      verb={TOKENS.revoke}
      button={{ size: 'compact-sm', color: undefined, variant: 'default' }}
      onConfirm={() => call('RevokeToken', { TokenId })}
    >
      <p>{TOKENS.effect}</p>
      {TokenId === own && <p>{TOKENS.ownEffect}</p>}
    </ConfirmButton>
  )
  return (
    <Table
      label={TOKENS.title}
      rows={tokens}
      keyOf={(token) => token.TokenId}
      columns={[
        [columns.token, (token) => <CopyId id={token.TokenId} />],
        [columns.role, (token) => (token.Kind === 'join' ? TOKENS.joins : token.Role), 'nowrap'],
        [columns.scope, scope, 'nowrap'],
        [columns.owner, owner],
        [columns.created, (token) => <Ago at={token.CreationTime} />, 'moment'],
        [columns.ends, (token) => <Expiry token={token} isExpired={isExpired(token)} />, 'moment'],
        [
          columns.action,
          (token) => token.RevocationTime === undefined && !isExpired(token) && revoke(token),
          'unnamed',
        ],
      ]}
    />
  )
}

function Expiry({ token, isExpired }: { token: Token; isExpired: boolean }) {
  if (token.RevocationTime !== undefined) {
    return <Status tone="idle" word={TOKENS.revoked} title={utc(token.RevocationTime)} />
  }
  if (token.ExpirationTime === undefined) return TOKENS.never
  return (
    <>
      {isExpired && <Status tone="idle" word={TOKENS.expired} />} {utc(token.ExpirationTime)}
    </>
  )
}
